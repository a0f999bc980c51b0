// One pass over the chosen rows of a float32 weight: moments, bias correction, decay, update, write-back.
// Formulas in functional.py. Rows are contiguous for dim 0; for dim 1 the "rows" are columns of row-major matrices.

#include <cmath>
#include <cstdint>
#include <vector>
#ifdef __SSE2__
#include <immintrin.h>
#endif

namespace {

struct Adam {
    std::vector<float> step_size, denominator;  // per chosen row, or one for all (stride 0)
    int64_t stride;
    float shrink, complement1, beta2, complement2, eps, sign;  // complements: 1 - beta, rounded once
};

Adam adam(const float* ages, int64_t count, double lr, double log_beta1, double log_beta2, float shrink,
          float complement1, float beta2, float complement2, float eps, float sign) {
    Adam a{{}, {}, count > 1, shrink, complement1, beta2, complement2, eps, sign};
    a.step_size.resize(count);
    a.denominator.resize(count);
    for (int64_t k = 0; k < count; ++k) {  // 1 - beta^t without cancellation
        if (k > 0 && ages[k] == ages[k - 1]) {
            a.step_size[k] = a.step_size[k - 1];
            a.denominator[k] = a.denominator[k - 1];
            continue;
        }
        a.step_size[k] = static_cast<float>(lr / -std::expm1(ages[k] * log_beta1));
        a.denominator[k] = static_cast<float>(std::sqrt(-std::expm1(ages[k] * log_beta2)));
    }
    return a;
}

// New value of one weight element; updates its moments.
inline float stepped(float w, float g, float& m, float& v, float step_size, float denominator, const Adam& a) {
    g *= a.sign;
    m += (g - m) * a.complement1;
    v = v * a.beta2 + g * g * a.complement2;
    return w * a.shrink - step_size * (m / (std::sqrt(v) / denominator + a.eps));
}

// Copies up to a cache line; a whole one past the cache, which saves reading what will be overwritten.
inline void write_line(float* to, const float* from, int64_t count) {
#ifdef __SSE2__
    if (count == 16 && reinterpret_cast<uintptr_t>(to) % 64 == 0) {
        for (int64_t j = 0; j < 16; j += 4) _mm_stream_ps(to + j, _mm_loadu_ps(from + j));
        return;
    }
#endif
    for (int64_t j = 0; j < count; ++j) to[j] = from[j];
}

}  // namespace

extern "C" {

// Rows: weight and grad (., n), moments (r, n); `rows` (r, n) holds the values in compact mode, null in dense mode.
void step_rows(float* weight, const float* grad, float* rows, float* exp_avg, float* exp_avg_sq, const int64_t* indices,
               int64_t r, int64_t n, const float* ages, int64_t count, double lr, double log_beta1, double log_beta2,
               float shrink, float complement1, float beta2, float complement2, float eps, float sign, int threads) {
    const Adam a = adam(ages, count, lr, log_beta1, log_beta2, shrink, complement1, beta2, complement2, eps, sign);
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t k = 0; k < r; ++k) {
        float* w = weight + indices[k] * n;
        const float* g = grad + (rows ? k : indices[k]) * n;
        float* value = rows ? rows + k * n : w;
        float* m = exp_avg + k * n;
        float* v = exp_avg_sq + k * n;
        const float s = a.step_size[k * a.stride], d = a.denominator[k * a.stride];
        const int64_t ahead = k + 1 < r ? (indices[k + 1] - indices[k]) * n : 0;
        for (int64_t from = 0; from < n; from += 16) {  // a cache line at a time, fetching that of the next row
            const int64_t to = from + 16 < n ? from + 16 : n;
            if (!rows) {
                __builtin_prefetch(w + ahead + from, 1);
                __builtin_prefetch(g + ahead + from, 0);
            }
#pragma omp simd
            for (int64_t j = from; j < to; ++j) {
                value[j] = stepped(value[j], g[j], m[j], v[j], s, d, a);
            }
            if (rows) write_line(w + from, value + from, to - from);
        }
#ifdef __SSE2__
        _mm_sfence();  // what went past the cache is in memory before the row counts as done
#endif
    }
}

// Columns: weight and grad (m, n), moments (m, r).
void step_columns(float* weight, const float* grad, float* exp_avg, float* exp_avg_sq, const int64_t* indices, int64_t m,
                  int64_t n, int64_t r, const float* ages, int64_t count, double lr, double log_beta1, double log_beta2,
                  float shrink, float complement1, float beta2, float complement2, float eps, float sign, int threads) {
    const Adam a = adam(ages, count, lr, log_beta1, log_beta2, shrink, complement1, beta2, complement2, eps, sign);
    const float *step_size = a.step_size.data(), *denominator = a.denominator.data();
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t i = 0; i < m; ++i) {
        float* w = weight + i * n;
        const float* g = grad + i * n;
        float* first = exp_avg + i * r;
        float* second = exp_avg_sq + i * r;
#pragma omp simd
        for (int64_t k = 0; k < r; ++k) {
            const int64_t j = indices[k];
            w[j] = stepped(w[j], g[j], first[k], second[k], step_size[k * a.stride], denominator[k * a.stride], a);
        }
    }
}

}  // extern "C"
