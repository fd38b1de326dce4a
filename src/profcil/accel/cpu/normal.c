/* Normal numbers as torch draws them on a CPU, with the same states before and after. Most of torch's time is the
   Mersenne twister, one number at a time; here it is advanced by whole SIMD vectors. */

#include <math.h>
#include <stdint.h>
#include <string.h>

enum { WORDS = 624, AHEAD = 397, BLOCK = 16 };

static uint32_t twisted(uint32_t high, uint32_t low, uint32_t other)
{
    const uint32_t y = (high & 0x80000000u) | (low & 0x7fffffffu);
    return other ^ (y >> 1) ^ (-(y & 1u) & 0x9908b0dfu);
}

static void twist(uint32_t *restrict s)
{
#pragma omp simd
    for (int k = 0; k < WORDS - AHEAD; k++) s[k] = twisted(s[k], s[k + 1], s[k + AHEAD]);
#pragma omp simd safelen(64)
    for (int k = WORDS - AHEAD; k < WORDS - 1; k++) s[k] = twisted(s[k], s[k + 1], s[k + AHEAD - WORDS]);
    s[WORDS - 1] = twisted(s[WORDS - 1], s[0], s[AHEAD - 1]);
}

/* n numbers in [0, 1) with 24 bits, from n words. */
static void temper(const uint32_t *restrict s, float *restrict to, long n)
{
#pragma omp simd
    for (long i = 0; i < n; i++) {
        uint32_t y = s[i];
        y ^= y >> 11;
        y ^= (y << 7) & 0x9d2c5680u;
        y ^= (y << 15) & 0xefc60000u;
        y ^= y >> 18;
        to[i] = (float)(int32_t)(y & 0xffffffu) * 0x1p-24f;
    }
}

typedef union { float number; int32_t bits; } Float;

/* ln x for x in (0, 1]: x = 2^k m with m near 1, and ln m = 2 artanh((m - 1) / (m + 1)). */
static inline float logarithm(float x)
{
    Float f = {x};
    const int32_t k = (f.bits - 0x3f3504f3) >> 23; /* m from √½ to √2 */
    f.bits -= k << 23;
    const float t = (f.number - 1) / (f.number + 1), q = t * t;
    const float series = 1 + q * (1.0f / 3 + q * (1.0f / 5 + q * (1.0f / 7 + q * (1.0f / 9))));
    return 2 * t * series + k * 0.693147181f;
}

/* cos and sin of x · π/2, x in [0, 4). */
static inline void cosine_and_sine(float x, float *cosine, float *sine)
{
    const int32_t quarter = (int32_t)(x + 0.5f);
    const float t = (x - quarter) * 1.57079633f, q = t * t;
    const float c = 1 + q * (-1.0f / 2 + q * (1.0f / 24 + q * (-1.0f / 720 + q * (1.0f / 40320))));
    const float s = t * (1 + q * (-1.0f / 6 + q * (1.0f / 120 + q * (-1.0f / 5040 + q * (1.0f / 362880)))));
    const float a = quarter & 1 ? s : c, b = quarter & 1 ? c : s;
    *cosine = (quarter + 1) & 2 ? -a : a;
    *sine = quarter & 2 ? -b : b;
}

/* Box–Muller transform: the first half of a block gives the radii, the second half the angles. */
static void box_muller(float *x)
{
#pragma omp simd
    for (int j = 0; j < BLOCK / 2; j++) {
        float cosine, sine;
        const float radius = sqrtf(-2 * logarithm(1 - x[j]));
        cosine_and_sine(4 * x[j + BLOCK / 2], &cosine, &sine);
        x[j] = radius * cosine;
        x[j + BLOCK / 2] = radius * sine;
    }
}

/* Draws n uniform numbers. `used`: words of the state used so far; returns the new value. */
static long uniform(uint32_t *s, long used, float *to, long n)
{
    while (n) {
        if (used == WORDS) twist(s), used = 0;
        const long now = n < WORDS - used ? n : WORDS - used;
        temper(s + used, to, now);
        used += now, to += now, n -= now;
    }
    return used;
}

/* Draws n ≥ 16 numbers. If n is no multiple of BLOCK, the last BLOCK numbers are drawn again, as in torch. */
int64_t normal(uint32_t *s, int64_t used, float *to, int64_t n)
{
    used = uniform(s, used, to, n);
    for (long i = 0; i + BLOCK <= n; i += BLOCK) box_muller(to + i);
    if (n % BLOCK) {
        used = uniform(s, used, to + n - BLOCK, BLOCK);
        box_muller(to + n - BLOCK);
    }
    return used;
}
