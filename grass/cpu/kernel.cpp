// One pass over the chosen rows of float32 weights: moments, bias correction, decay, update, write-back.
// Formulas in functional.py. One call takes many weights: small ones go to one thread each, of others every thread
// has a part.

#include "kernel.h"

#include <omp.h>
#ifdef __SSE2__
#include <immintrin.h>
#endif

namespace {

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

template <bool active>
void step_rows(const Weight& x, const Coefficients& c, const Adam& a, const Team& team) {
    const int64_t n = x.width;
    const float shrink = x.shrink;
    for (int64_t k = team.begin(x.r); k < team.end(x.r); ++k) {
        float* w = x.weight ? x.weight + x.indices[k] * n : nullptr;
        const float* g = x.grad + (active ? k : x.indices[k]) * n;
        float* value = active ? x.values + k * n : w;
        float *m = x.exp_avg + k * n, *v = x.exp_avg_sq + k * n;
        const float size = c.step_size[k], unbias = c.unbias[k];
        const int64_t ahead = k + 1 < x.r ? (x.indices[k + 1] - x.indices[k]) * n : 0;
        for (int64_t from = 0; from < n; from += 16) {  // a cache line at a time, fetching that of the next row
            const int64_t to = from + 16 < n ? from + 16 : n;
            if (!active) {
                __builtin_prefetch(w + ahead + from, 1);
                __builtin_prefetch(g + ahead + from, 0);
            }
#pragma omp simd
            for (int64_t j = from; j < to; ++j)
                value[j] = value[j] * shrink - size * a.direction(g[j], m[j], v[j], unbias);
            if (active && w) write_line(w + from, value + from, to - from);
        }
    }
}

template <bool active>
void step_columns(const Weight& x, const Coefficients& c, const Adam& a, const Team& team) {
    const float shrink = x.shrink, *size = c.step_size.data(), *unbias = c.unbias.data();
    const int64_t r = x.r, n = x.total, *indices = x.indices;
    for (int64_t i = team.begin(x.width); i < team.end(x.width); ++i) {
        float* w = x.weight ? x.weight + i * n : nullptr;
        const float* g = x.grad + i * (active ? r : n);
        float* value = active ? x.values + i * r : w;
        float *m = x.exp_avg + i * r, *v = x.exp_avg_sq + i * r;
        if (!active) {  // the next row, whose values are met out of order
            prefetch(w + n, n);
            prefetch(g + n, n);
        }
#pragma omp simd
        for (int64_t k = 0; k < r; ++k) {
            const int64_t j = active ? k : indices[k];
            value[j] = value[j] * shrink - size[k] * a.direction(g[j], m[k], v[k], unbias[k]);
        }
        if (active && w)
            for (int64_t k = 0; k < r; ++k) w[indices[k]] = value[k];
    }
}

void step_one(const Weight& x, const Adam& a, const Team& team) {
    const Coefficients c(x, a);
    if (x.explores)
        step_and_explore(x, c, a, team);
    else if (x.in_rows)
        x.values ? step_rows<true>(x, c, a, team) : step_rows<false>(x, c, a, team);
    else
        x.values ? step_columns<true>(x, c, a, team) : step_columns<false>(x, c, a, team);
}

}  // namespace

extern "C" void step(const Weight* weights, int64_t count, double log_beta1, double log_beta2, float complement1,
                     float beta2, float complement2, float eps, float sign, int threads) {
    const Adam a{log_beta1, log_beta2, complement1, beta2, complement2, eps, sign};
    std::vector<Sums> sums(threads);
#pragma omp parallel num_threads(threads)
    {
        Sums own;
        const Team alone{0, 1, &own}, all{omp_get_thread_num(), omp_get_num_threads(), sums.data()};
#pragma omp for schedule(dynamic) nowait
        for (int64_t i = 0; i < count; ++i)
            if (weights[i].is_small()) step_one(weights[i], a, alone);
        for (int64_t i = 0; i < count; ++i)
            if (!weights[i].is_small()) step_one(weights[i], a, all);
#ifdef __SSE2__
        _mm_sfence();  // what went past the cache is in memory before the step counts as done
#endif
    }
}
