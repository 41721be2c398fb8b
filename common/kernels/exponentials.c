/* Functions of exponentials, several times faster than MLX's CPU build computes them on Linux.

   MLX computes one exponential at a time there, on one core. In a long prompt this takes more than
   half of all time. The functions below are vectorised by the compiler, on x86 for the instructions
   of the processor that they run on, and use several threads. */

#include <math.h>
#include <pthread.h>
#include <stdint.h>
#include <string.h>

#define LANES 16 /* partial results, in the same order for all vector widths */
#define MOST_THREADS 64
#if !defined(VECTORISED) && defined(__x86_64__)
#define VECTORISED __attribute__((target_clones("avx512f", "avx2", "default")))
#elif !defined(VECTORISED)
#define VECTORISED /* every 64-bit ARM processor has the same vectors */
#endif

/* Returns 2^power, and 0 where that is no normal float; the relative error is about 1e-7.

   2^power = 2^n * 2^r, where n is the integer next to power and r is in [-0.5, 0.5]. 2^r is its
   Taylor series, and n is added to the exponent of the float. */
static inline float power_of_two(float power) {
    const float round = 12582912.0f; /* 1.5 * 2^23: adding it leaves no bits for a fraction */
    float bounded = power < -126.0f ? -126.0f : power > 127.0f ? 127.0f : power;
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
    return power < -126.0f ? 0.0f : found * scale.value;
}

#define LOG2_OF_E 1.44269504f

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

/* Replaces scores by exp(score - highest). */
VECTORISED static void exponentials(float *row, float highest, long count) {
    for (long column = 0; column < count; column++)
        row[column] = power_of_two((row[column] - highest) * LOG2_OF_E);
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

VECTORISED static void sigmoids(const float *numbers, float *results, long count) {
    for (long at = 0; at < count; at++)
        results[at] = 1.0f / (1.0f + power_of_two(numbers[at] * -LOG2_OF_E));
}

/* Stores tanh(x) = 1 - 2 / (1 + exp(2 x)), and its Taylor series near 0, where that cancels. */
VECTORISED static void tangents(const float *numbers, float *results, long count) {
    for (long at = 0; at < count; at++) {
        float x = numbers[at], square = x * x;
        float far = 1.0f - 2.0f / (1.0f + power_of_two(x * (2.0f * LOG2_OF_E)));
        float near = 62.0f / 2835.0f;
        near = near * square - 17.0f / 315.0f;
        near = near * square + 2.0f / 15.0f;
        near = near * square - 1.0f / 3.0f;
        near = x + x * square * near;
        results[at] = square < 0.0625f ? near : far;
    }
}

/* Stores erf(x) with an error of 2e-7: from 1 on by formula 7.1.26 of Abramowitz and Stegun, Handbook
   of Mathematical Functions. Below, where the formula cancels and is rounded often, erf(x) / x is a
   Chebyshev series of degree 5 in x^2. */
VECTORISED static void error_functions(const float *numbers, float *results, long count) {
    for (long at = 0; at < count; at++) {
        float x = numbers[at], square = x * x, size = x < 0.0f ? -x : x;
        float part = 1.0f / (1.0f + 0.3275911f * size);
        float sum = 1.061405429f;
        sum = sum * part - 1.453152027f;
        sum = sum * part + 1.421413741f;
        sum = sum * part - 0.284496736f;
        sum = sum * part + 0.254829592f;
        float far = 1.0f - sum * part * power_of_two(square * -LOG2_OF_E);
        float near = -5.654106e-4f;
        near = near * square + 4.9232777e-3f;
        near = near * square - 2.6716385e-2f;
        near = near * square + 1.1280364e-1f;
        near = near * square - 3.7612350e-1f;
        near = near * square + 1.1283791f;
        results[at] = square < 1.0f ? near * x : x < 0.0f ? -far : far;
    }
}

/* Stores 0.5 x (1 + tanh(inner)) = x / (1 + exp(-2 inner)), the usual approximation of GELU. */
VECTORISED static void approximate_gelus(const float *numbers, float *results, long count) {
    for (long at = 0; at < count; at++) {
        float x = numbers[at];
        float inner = 0.7978845608f * (x + 0.044715f * x * x * x); /* sqrt(2 / pi) */
        results[at] = x / (1.0f + power_of_two(inner * (-2.0f * LOG2_OF_E)));
    }
}

typedef void Function(const float *numbers, float *results, long count);

/* A call, and the part of it for one thread: the rows, or numbers, from `first` to `last`. */
typedef struct {
    float *results;
    const float *numbers;
    Function *function;
    const uint8_t *mask;
    long columns, tokens, sharing;
    int causal;
    long first, last;
} Share;

static void *softmax_share(void *argument) {
    Share *share = argument;
    for (long row = share->first; row < share->last; row++) {
        long token = row % share->tokens, columns = share->columns;
        long count = share->causal ? columns - share->tokens + token + 1 : columns;
        const uint8_t *mask = share->mask;
        if (mask)
            mask += (row / share->sharing * share->tokens + token) * columns;
        float *scores = share->results + row * columns;
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

static void *function_share(void *argument) {
    Share *share = argument;
    share->function(share->numbers + share->first, share->results + share->first,
                    share->last - share->first);
    return NULL;
}

/* Calls `compute` for equal shares of `count` rows or numbers. */
static void divide(Share call, void *(*compute)(void *), long count, int threads) {
    pthread_t started[MOST_THREADS];
    Share shares[MOST_THREADS];
    int runs[MOST_THREADS] = {0};
    threads = threads < 1 ? 1 : threads > MOST_THREADS ? MOST_THREADS : threads;
    for (int number = threads - 1; number >= 0; number--) {
        shares[number] = call;
        shares[number].first = count * number / threads;
        shares[number].last = count * (number + 1) / threads;
        if (number > 0)
            runs[number] = !pthread_create(&started[number], NULL, compute, &shares[number]);
        if (!runs[number])
            compute(&shares[number]);
    }
    for (int number = 1; number < threads; number++)
        if (runs[number])
            pthread_join(started[number], NULL);
}

/* Replaces each row of scores by its softmax.

   scores: [rows, columns], where every `tokens` rows in turn belong to successive tokens.
   mask: [rows / sharing, tokens, columns], 0 where a token does not attend; or NULL.
   causal: whether the last token attends to all columns, and each earlier one to one column less. */
void mlx_kernels_softmax(float *scores, const uint8_t *mask, long rows, long columns, long tokens,
                         long sharing, int causal, int threads) {
    Share call = {.results = scores, .mask = mask, .columns = columns, .tokens = tokens,
                  .sharing = sharing, .causal = causal};
    divide(call, softmax_share, rows, threads);
}

/* The functions below store f(number) for each number; `results` may be `numbers`. */

static void apply(Function *function, const float *numbers, float *results, long count,
                  int threads) {
    Share call = {.results = results, .numbers = numbers, .function = function};
    divide(call, function_share, count, threads);
}

void mlx_kernels_sigmoid(const float *numbers, float *results, long count, int threads) {
    apply(sigmoids, numbers, results, count, threads);
}

void mlx_kernels_tanh(const float *numbers, float *results, long count, int threads) {
    apply(tangents, numbers, results, count, threads);
}

void mlx_kernels_erf(const float *numbers, float *results, long count, int threads) {
    apply(error_functions, numbers, results, count, threads);
}

void mlx_kernels_gelu_approx(const float *numbers, float *results, long count, int threads) {
    apply(approximate_gelus, numbers, results, count, threads);
}
