// One pass over the chosen rows of float32 weights: moments, bias correction, decay, update, write-back.
// Formulas in functional.py. One call takes many weights: their rows are shared out over the threads.

#include <cmath>
#include <cstdint>
#include <vector>
#ifdef __SSE2__
#include <immintrin.h>
#endif

namespace {

// What _WEIGHT in cpu_kernel.py packs. Chosen are r rows of `width` values; where `stride` is not 0, r columns of
// row-major matrices `stride` (moments and values: r) wide. With `values` these are stepped, and copied into `weight`
// unless it is null, and grad is compact; otherwise weight and grad are whole.
struct Weight {
    float* weight;
    const float* grad;
    float *values, *exp_avg, *exp_avg_sq;
    const int64_t* indices;
    const float* ages;  // Adam steps of each row; null: `age` for all
    int64_t r, width, stride;
    double age, step_size, shrink;
};

struct Adam {
    double log_beta1, log_beta2;
    float complement1, beta2, complement2, eps, sign;  // complements: 1 - beta, rounded once
};

// Per chosen row, or one for all: 1 - beta^t without cancellation.
struct Coefficients {
    std::vector<float> step_size, denominator;
    int64_t each;  // 0 where one serves all rows

    Coefficients(const Weight& w, const Adam& a) : each(w.ages != nullptr) {
        const int64_t count = each ? w.r : 1;
        step_size.resize(count);
        denominator.resize(count);
        for (int64_t k = 0; k < count; ++k) {
            if (k > 0 && w.ages[k] == w.ages[k - 1]) {
                step_size[k] = step_size[k - 1];
                denominator[k] = denominator[k - 1];
                continue;
            }
            const double age = each ? w.ages[k] : w.age;
            step_size[k] = static_cast<float>(w.step_size / -std::expm1(age * a.log_beta1));
            denominator[k] = static_cast<float>(std::sqrt(-std::expm1(age * a.log_beta2)));
        }
    }
};

// New value of one weight element; updates its moments.
inline float stepped(float w, float g, float& m, float& v, float step_size, float denominator, float shrink,
                     const Adam& a) {
    g *= a.sign;
    m += (g - m) * a.complement1;
    v = v * a.beta2 + g * g * a.complement2;
    return w * shrink - step_size * (m / (std::sqrt(v) / denominator + a.eps));
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

// Rows k of one weight, shared out over the threads that call this together.
template <bool active>
void step_rows(const Weight& x, const Coefficients& c, const Adam& a) {
    const int64_t n = x.width;
    const float shrink = x.shrink;
#pragma omp for schedule(static) nowait
    for (int64_t k = 0; k < x.r; ++k) {
        float* w = x.weight ? x.weight + x.indices[k] * n : nullptr;
        const float* g = x.grad + (active ? k : x.indices[k]) * n;
        float* value = active ? x.values + k * n : w;
        float* m = x.exp_avg + k * n;
        float* v = x.exp_avg_sq + k * n;
        const float s = c.step_size[k * c.each], d = c.denominator[k * c.each];
        const int64_t ahead = k + 1 < x.r ? (x.indices[k + 1] - x.indices[k]) * n : 0;
        for (int64_t from = 0; from < n; from += 16) {  // a cache line at a time, fetching that of the next row
            const int64_t to = from + 16 < n ? from + 16 : n;
            if (!active) {
                __builtin_prefetch(w + ahead + from, 1);
                __builtin_prefetch(g + ahead + from, 0);
            }
#pragma omp simd
            for (int64_t j = from; j < to; ++j) value[j] = stepped(value[j], g[j], m[j], v[j], s, d, shrink, a);
            if (active && w) write_line(w + from, value + from, to - from);
        }
    }
}

// Columns: row i of the matrices is one thread's.
template <bool active>
void step_columns(const Weight& x, const Coefficients& c, const Adam& a) {
    const float shrink = x.shrink, *step_size = c.step_size.data(), *denominator = c.denominator.data();
    const int64_t r = x.r, *indices = x.indices;
#pragma omp for schedule(static) nowait
    for (int64_t i = 0; i < x.width; ++i) {
        float* w = x.weight ? x.weight + i * x.stride : nullptr;
        const float* g = x.grad + i * (active ? r : x.stride);
        float* value = active ? x.values + i * r : w;
        float* m = x.exp_avg + i * r;
        float* v = x.exp_avg_sq + i * r;
        if (!active)
            for (int64_t j = 0; j < x.stride; j += 16) {  // the next row, whose values are met out of order
                __builtin_prefetch(w + x.stride + j, 1);
                __builtin_prefetch(g + x.stride + j);
            }
#pragma omp simd
        for (int64_t k = 0; k < r; ++k) {
            const int64_t j = active ? k : indices[k];
            value[j] = stepped(value[j], g[j], m[k], v[k], step_size[k * c.each], denominator[k * c.each], shrink, a);
        }
        if (active && w)
            for (int64_t k = 0; k < r; ++k) w[indices[k]] = value[k];
    }
}

}  // namespace

extern "C" void step(const Weight* weights, int64_t count, double log_beta1, double log_beta2, float complement1,
                     float beta2, float complement2, float eps, float sign, int threads) {
    const Adam a{log_beta1, log_beta2, complement1, beta2, complement2, eps, sign};
    std::vector<Coefficients> coefficients;
    coefficients.reserve(count);
    for (int64_t i = 0; i < count; ++i) coefficients.emplace_back(weights[i], a);
#pragma omp parallel num_threads(threads)
    {
        for (int64_t i = 0; i < count; ++i) {
            const Weight& x = weights[i];
            if (x.stride)
                x.values ? step_columns<true>(x, coefficients[i], a) : step_columns<false>(x, coefficients[i], a);
            else
                x.values ? step_rows<true>(x, coefficients[i], a) : step_rows<false>(x, coefficients[i], a);
        }
#ifdef __SSE2__
        _mm_sfence();  // what went past the cache is in memory before the step counts as done
#endif
    }
}
