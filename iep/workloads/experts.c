/* Rows sorted by expert times the experts' weights, and the gradients back; expert_products.py loads it.

   Expert n has the rows from firsts[n] to lasts[n] - 1 and the weight, or the weight's gradient, weights[n] (I, O); left
   (R, I) and right (R, O) are all rows. Experts from start to end - 1 are computed. I and O are multiples of 128
   bytes. A block of results stays in registers while everything that adds to it goes by. With few rows an expert,
   fetching its weight takes as long as multiplying, so the next expert's is fetched meanwhile. Compiled twice, for float
   and double. */

#include <string.h>
#ifdef __AVX512F__
#include <immintrin.h>
#endif

#define JOIN(name, real) name##_##real
#define EXPAND(name, real) JOIN(name, real)
#define NAME(name) EXPAND(name, REAL)

#ifndef REAL

#define INLINE static inline __attribute__((always_inline))
#define APART static __attribute__((noinline)) /* gcc gives a loop of its own more registers */
#define UNROLL _Pragma("GCC unroll 16")
#define NEAR (1 << 19) /* bytes: a weight for which there is room beside another in a processor's second cache */

/* What registers hold: vectors of BYTES, and the sums of ROWS rows of two of them. */
#if defined(__AVX512F__)
#define BYTES 64
#define ROWS 12
#elif defined(__AVX__)
#define BYTES 32
#define ROWS 6
#else
#define BYTES 16
#define ROWS 6
#endif

#define REAL float
#define LANES (BYTES / 4)
#include "experts.c"
#undef REAL
#undef LANES
#undef EVEN
#undef ODD
#define REAL double
#define LANES (BYTES / 8)
#include "experts.c"

#else

typedef REAL NAME(vector) __attribute__((vector_size(BYTES), aligned(__alignof__(REAL)), may_alias));
#define VECTOR NAME(vector)
#define AT(address) (*(const VECTOR *)(address))
#define PANEL (2 * LANES)

/* What is written for somebody else to read goes straight to memory: a cache would first read what was there. */
INLINE void NAME(store)(REAL *to, VECTOR value, const int away)
{
#ifdef __AVX512F__
    if (away && (size_t)to % BYTES == 0) {
        _mm512_stream_si512((void *)to, (__m512i)value);
        return;
    }
#endif
    *(VECTOR *)to = value;
}

/* c (rows, PANEL) = a (rows, K) b (K, PANEL); a_row is from one row of a to the next, a_k from one column to the next. */
INLINE void NAME(block)(const int rows, const int away, long K, const REAL *a, long a_row, long a_k, const REAL *b,
                        long b_k, const REAL *fetch, long fetch_k, REAL *c, long c_row)
{
    VECTOR sums[ROWS][2];
    UNROLL for (int r = 0; r < rows; r++) sums[r][0] = sums[r][1] = (VECTOR){0};
    for (long k = 0; k < K; k++, a += a_k, b += b_k, fetch += fetch_k) {
        const VECTOR b0 = AT(b), b1 = AT(b + LANES);
        if (!away) {
            __builtin_prefetch(fetch, 0, 2);
            __builtin_prefetch(fetch + LANES, 0, 2);
        }
        UNROLL for (int r = 0; r < rows; r++) {
            sums[r][0] += a[r * a_row] * b0;
            sums[r][1] += a[r * a_row] * b1;
        }
    }
    UNROLL for (int r = 0; r < rows; r++) {
        NAME(store)(c + r * c_row, sums[r][0], away);
        NAME(store)(c + r * c_row + LANES, sums[r][1], away);
    }
}

#define BLOCK(n)                                                                            \
    case n:                                                                                 \
        if (n <= ROWS)                                                                      \
            NAME(block)(n, away, K, a, a_row, a_k, b, b_k, fetch, fetch_k, c, c_row);       \
        break;

INLINE void NAME(blocks)(int rows, const int away, long K, const REAL *a, long a_row, long a_k, const REAL *b, long b_k,
                         const REAL *fetch, long fetch_k, REAL *c, long c_row)
{
    switch (rows) {
        BLOCK(1) BLOCK(2) BLOCK(3) BLOCK(4) BLOCK(5) BLOCK(6)
        BLOCK(7) BLOCK(8) BLOCK(9) BLOCK(10) BLOCK(11) BLOCK(12)
    }
}

/* How many rows the next block takes, so that all blocks of what is left are of about one size. */
INLINE int NAME(share)(long rows)
{
    const long blocks = (rows + ROWS - 1) / ROWS;
    return (rows + blocks - 1) / blocks;
}

/* right = left times the weights */
void NAME(rows)(long start, long end, long I, long O, const long *firsts, const long *lasts, REAL *const *weights,
                const REAL *left, REAL *right)
{
    const int near = I * O * (long)sizeof(REAL) <= NEAR;
    for (long n = start; n < end; n++) {
        const REAL *weight = weights[n], *next = weights[n + 1 < end ? n + 1 : n];
        for (long j = 0; j < O; j += PANEL) {
            const REAL *fetch = near ? next + j * I : weight + j + PANEL;
            long fetch_k = near ? PANEL : O;
            for (long r = firsts[n], rows; r < lasts[n]; r += rows, fetch = weight, fetch_k = 0) {
                rows = NAME(share)(lasts[n] - r);
                NAME(blocks)(rows, 0, I, left + r * I, I, 1, weight + j, O, fetch, fetch_k, right + r * O + j, O);
            }
        }
    }
}

/* weights = the sums over their rows of left times right */
void NAME(weights)(long start, long end, long I, long O, const long *firsts, const long *lasts, REAL *const *weights,
                   const REAL *left, const REAL *right)
{
    for (long n = start; n < end; n++) {
        const REAL *a = left + firsts[n] * I, *b = right + firsts[n] * O;
        for (long i = 0, rows; i < I; i += rows) {
            rows = NAME(share)(I - i);
            for (long j = 0; j < O; j += PANEL)
                NAME(blocks)(rows, 1, lasts[n] - firsts[n], a + i, 1, I, b + j, O, b, 0, weights[n] + i * O + j, O);
        }
    }
#ifdef __AVX512F__
    _mm_sfence();
#endif
}

#if LANES == 2
#define EVEN 0, 2
#define ODD 1, 3
#elif LANES == 4
#define EVEN 0, 2, 4, 6
#define ODD 1, 3, 5, 7
#elif LANES == 8
#define EVEN 0, 2, 4, 6, 8, 10, 12, 14
#define ODD 1, 3, 5, 7, 9, 11, 13, 15
#else
#define EVEN 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30
#define ODD 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31
#endif
#define HALVE(n)                                                              \
    UNROLL for (int m = 0; m < LANES / n; m++)                                \
        v[m] = __builtin_shufflevector(v[2 * m], v[2 * m + 1], EVEN) +        \
               __builtin_shufflevector(v[2 * m], v[2 * m + 1], ODD);

/* The sums of each of LANES vectors, in order. */
INLINE VECTOR NAME(sums)(VECTOR *v)
{
    HALVE(2) HALVE(4) HALVE(8) HALVE(16)
    return v[0];
}

/* left (rows, LANES) = right (rows, O) times weight (LANES, O) transposed; rows divides LANES. */
INLINE void NAME(dots)(const int rows, long I, long O, const REAL *right, const REAL *weight, long ahead, REAL *left)
{
    const int columns = LANES / rows;
    for (long i = 0; i < LANES; i += columns, weight += columns * O) {
        VECTOR v[LANES];
        UNROLL for (int n = 0; n < LANES; n++) v[n] = (VECTOR){0};
        for (long o = 0; o < O; o += LANES) {
            VECTOR w[LANES];
            UNROLL for (int c = 0; c < columns; c++) w[c] = AT(weight + c * O + o);
            UNROLL for (int c = 0; c < columns; c++) __builtin_prefetch(weight + c * O + o + ahead, 0, 2);
            UNROLL for (int r = 0; r < rows; r++) {
                const VECTOR x = AT(right + r * O + o);
                UNROLL for (int c = 0; c < columns; c++) v[r * columns + c] += w[c] * x;
            }
        }
        const VECTOR totals = NAME(sums)(v);
        UNROLL for (int r = 0; r < rows; r++)
            memcpy(left + r * I + i, (const REAL *)&totals + r * columns, columns * sizeof(REAL));
    }
}

APART void NAME(dots_of_1)(long I, long O, const REAL *right, const REAL *weight, long ahead, REAL *left)
{
    NAME(dots)(1, I, O, right, weight, ahead, left);
}

APART void NAME(dots_of_2)(long I, long O, const REAL *right, const REAL *weight, long ahead, REAL *left)
{
    NAME(dots)(2, I, O, right, weight, ahead, left);
}

APART void NAME(dots_of_4)(long I, long O, const REAL *right, const REAL *weight, long ahead, REAL *left)
{
    NAME(dots)(LANES < 4 ? 1 : 4, I, O, right, weight, ahead, left);
}

/* left = right times the weights transposed */
void NAME(rows_back)(long start, long end, long I, long O, const long *firsts, const long *lasts, REAL *const *weights,
                     REAL *left, const REAL *right)
{
    const int near = I * O * (long)sizeof(REAL) <= NEAR;
    for (long n = start; n < end; n++) {
        const REAL *next = weights[n + 1 < end ? n + 1 : n];
        for (long i = 0; i < I; i += LANES) {
            const REAL *weight = weights[n] + i * O;
            long ahead = near ? next - weights[n] : LANES * O;
            for (long r = firsts[n], rows; r < lasts[n]; r += rows, ahead = 0) {
                const long rest = lasts[n] - r;
                rows = rest >= 4 && LANES >= 4 ? 4 : rest >= 2 ? 2 : 1;
                (rows == 4 ? NAME(dots_of_4) : rows == 2 ? NAME(dots_of_2) : NAME(dots_of_1))(
                    I, O, right + r * O, weight, ahead, left + r * I + i);
            }
        }
    }
}

/* of_gates (R,) = the sums over each row of gradient (R, H) times hidden; then gradient = gradient times the row's gate
   where hidden is greater than 0, else 0. For rows from start to end - 1. */
void NAME(hidden_back)(long start, long end, long H, const REAL *gates, const REAL *all_hidden, REAL *all_gradient,
                       REAL *of_gates)
{
    for (long r = start; r < end; r++) {
        const REAL *restrict hidden = all_hidden + r * H, gate = gates[r];
        REAL *restrict gradient = all_gradient + r * H, sum = 0;
        for (long j = 0; j < H; j++) {
            sum += gradient[j] * hidden[j];
            gradient[j] = hidden[j] > 0 ? gradient[j] * gate : 0;
        }
        of_gates[r] = sum;
    }
}

#undef VECTOR
#undef AT
#undef PANEL
#undef BLOCK
#undef HALVE
#endif
