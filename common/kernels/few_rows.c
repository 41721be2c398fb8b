/* Multiplies few rows by a large matrix faster than OpenBLAS does on x86.

   A decode step multiplies the rows of a few sequences by every weight matrix. MLX calls cblas_sgemm
   for that, which copies the matrix into blocks before it multiplies, because that pays for many
   rows. For few rows the copy takes longer than the product. cblas_sgemv multiplies one row without
   a copy, but OpenBLAS forwards products of one row to it on ARM only (GEMM_GEMV_FORWARD in its
   Makefile.system, version 0.3.34).

   This library is preloaded before OpenBLAS, so MLX calls the function below. */

#ifdef __x86_64__
#define _GNU_SOURCE
#include <dlfcn.h>

enum { ROW_MAJOR = 101, NORMAL = 111, TRANSPOSED = 112 };

#define MOST_ROWS 6             /* from 7 rows on, cblas_sgemm is about as fast */
#define LEAST_ONE (1 << 18)     /* elements of the matrix from which a product of one row gains */
#define LEAST_MORE (1 << 19)    /* the same for a product of several rows */
#define BLOCK (1 << 20)         /* elements that stay in the cache while several rows use them */

typedef void Sgemm(int order, int left_form, int right_form, int rows, int columns, int inner,
                   float alpha, const float *left, int left_stride, const float *right,
                   int right_stride, float beta, float *product, int product_stride);

extern void cblas_sgemv(int order, int form, int rows, int columns, float alpha,
                        const float *matrix, int stride, const float *vector, int step, float beta,
                        float *product, int product_step);

static Sgemm *openblas;

__attribute__((constructor)) static void find_openblas(void) {
    openblas = (Sgemm *)dlsym(RTLD_NEXT, "cblas_sgemm");
}

/* left is [rows, inner]; right is [columns, inner] if it is transposed, as weights are. */
void cblas_sgemm(int order, int left_form, int right_form, int rows, int columns, int inner,
                 float alpha, const float *left, int left_stride, const float *right,
                 int right_stride, float beta, float *product, int product_stride) {
    long elements = (long)columns * inner;
    if (order != ROW_MAJOR || left_form != NORMAL || right_form != TRANSPOSED || rows > MOST_ROWS ||
        elements < (rows == 1 ? LEAST_ONE : LEAST_MORE)) {
        openblas(order, left_form, right_form, rows, columns, inner, alpha, left, left_stride,
                 right, right_stride, beta, product, product_stride);
        return;
    }
    long block = rows == 1 || inner > BLOCK ? columns : BLOCK / inner;
    for (long first = 0; first < columns; first += block) {
        long count = columns - first < block ? columns - first : block;
        for (long row = 0; row < rows; row++)
            cblas_sgemv(ROW_MAJOR, NORMAL, (int)count, inner, alpha, right + first * right_stride,
                        right_stride, left + row * left_stride, 1, beta,
                        product + row * product_stride + first, 1);
    }
}
#endif
