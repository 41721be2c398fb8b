/* Computes the softmax of attention scores several times faster than MLX's CPU build on x86.

   MLX computes one exponential at a time there, on one core, which takes four fifths of the time of
   attention in a long prompt. The functions below are vectorised by the compiler, for the
   instructions of the processor that they run on, and use several threads. */

#include <math.h>
#include <pthread.h>
#include <stdint.h>
#include <string.h>

#define LANES 16       /* partial results, in the same order for all vector widths */
#define MOST_THREADS 64
#define VECTORISED __attribute__((target_clones("avx512f", "avx2", "default")))

/* The rows `first` to `last` of the scores; the rest as in `softmax_rows`. */
typedef struct {
    float *scores;
    const uint8_t *mask;
    long first, last, columns, tokens, sharing;
    int causal;
} Share;

/* Replaces masked scores by minus infinity; returns the highest score, or NaN if all are NaN. */
VECTORISED static float highest_score(float *row, const uint8_t *mask, long count) {
    float most[LANES];
    for (int lane = 0; lane < LANES; lane++)
        most[lane] = -INFINITY;
    if (mask)
        for (long column = 0; column < count; column++)
            row[column] = mask[column] ? row[column] : -INFINITY;
    long column = 0;
    for (; column + LANES <= count; column += LANES)
        for (int lane = 0; lane < LANES; lane++)
            most[lane] = row[column + lane] <= most[lane] ? most[lane] : row[column + lane];
    for (; column < count; column++)
        most[0] = row[column] <= most[0] ? most[0] : row[column];
    for (int lane = 1; lane < LANES; lane++)
        most[0] = most[lane] <= most[0] ? most[0] : most[lane];
    return most[0];
}

/* Replaces scores by exp(score - highest), with a relative error of about 1e-7.

   exp(x) = 2^n * 2^r, where n is the integer next to x / ln 2 and r is in [-0.5, 0.5]. 2^r is its
   Taylor series, and n is added to the exponent of the float. */
VECTORISED static void exponentials(float *row, float highest, long count) {
    const float round = 12582912.0f; /* 1.5 * 2^23: adding it leaves no bits for a fraction */
    for (long column = 0; column < count; column++) {
        float power = (row[column] - highest) * 1.44269504f;
        float bounded = power < -126.0f ? -126.0f : power;
        float whole = (bounded + round) - round, rest = bounded - whole;
        float found = 1.5403530e-4f;
        found = found * rest + 1.3333558e-3f;
        found = found * rest + 9.6181291e-3f;
        found = found * rest + 5.5504109e-2f;
        found = found * rest + 2.4022651e-1f;
        found = found * rest + 6.9314718e-1f;
        found = found * rest + 1.0f;
        union {
            int32_t bits;
            float value;
        } scale = {((int32_t)whole + 127) << 23};
        row[column] = power < -126.0f ? 0.0f : found * scale.value;
    }
}

VECTORISED static void normalise(float *row, long count) {
    float sums[LANES] = {0};
    long column = 0;
    for (; column + LANES <= count; column += LANES)
        for (int lane = 0; lane < LANES; lane++)
            sums[lane] += row[column + lane];
    for (; column < count; column++)
        sums[0] += row[column];
    for (int lane = 1; lane < LANES; lane++)
        sums[0] += sums[lane];
    float factor = 1.0f / sums[0];
    for (column = 0; column < count; column++)
        row[column] *= factor;
}

static void *compute_share(void *argument) {
    Share *share = argument;
    for (long row = share->first; row < share->last; row++) {
        long token = row % share->tokens, columns = share->columns;
        long count = share->causal ? columns - share->tokens + token + 1 : columns;
        const uint8_t *mask = share->mask;
        if (mask)
            mask += (row / share->sharing * share->tokens + token) * columns;
        float *scores = share->scores + row * columns;
        float highest = highest_score(scores, mask, count);
        if (highest == -INFINITY) { /* padding attends to nothing, but must not become NaN */
            memset(scores, 0, (size_t)columns * sizeof(float));
            continue;
        }
        exponentials(scores, highest, count);
        normalise(scores, count);
        memset(scores + count, 0, (size_t)(columns - count) * sizeof(float));
    }
    return NULL;
}

/* Replaces each row of scores by its softmax.

   scores: [rows, columns], where every `tokens` rows in turn belong to successive tokens.
   mask: [rows / sharing, tokens, columns], 0 where a token does not attend; or NULL.
   causal: whether the last token attends to all columns, and each earlier one to one column less. */
void attention_softmax(float *scores, const uint8_t *mask, long rows, long columns, long tokens,
                       long sharing, int causal, int threads) {
    pthread_t started[MOST_THREADS];
    Share shares[MOST_THREADS];
    int runs[MOST_THREADS] = {0};
    threads = threads < 1 ? 1 : threads > MOST_THREADS ? MOST_THREADS : threads;
    for (int number = threads - 1; number >= 0; number--) {
        shares[number] = (Share){scores,  mask,   rows * number / threads,
                                 rows * (number + 1) / threads,
                                 columns, tokens, sharing, causal};
        if (number > 0)
            runs[number] = !pthread_create(&started[number], NULL, compute_share, &shares[number]);
        if (!runs[number])
            compute_share(&shares[number]);
    }
    for (int number = 1; number < threads; number++)
        if (runs[number])
            pthread_join(started[number], NULL);
}
