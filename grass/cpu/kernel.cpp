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
        float* w = x.weight ? x.weight[x.indices[k]] : nullptr;
        const float* g = x.grad[active ? k : x.indices[k]];
        float* value = active ? x.values[k] : w;
        float *m = x.exp_avg[k], *v = x.exp_avg_sq[k];
        const float size = c.step_size[k], unbias = c.unbias[k];
        const int64_t next = x.indices[k + 1 < x.r ? k + 1 : k];
        for (int64_t from = 0; from < n; from += 16) {  // a cache line at a time, fetching that of the next row
            const int64_t to = from + 16 < n ? from + 16 : n;
            if (!active) {
                __builtin_prefetch(x.weight[next] + from, 1);
                __builtin_prefetch(x.grad[next] + from, 0);
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
    const int64_t r = x.r, *indices = x.indices;
    for (int64_t i = team.begin(x.width); i < team.end(x.width); ++i) {
        float* w = x.weight ? x.weight[i] : nullptr;
        const float* g = x.grad[i];
        float* value = active ? x.values[i] : w;
        float *m = x.exp_avg[i], *v = x.exp_avg_sq[i];
        if (w) prefetch(x.weight[i + 1], x.total);  // the next row, whose values are met out of order
        if (!active) prefetch(x.grad[i + 1], x.total);
#pragma omp simd
        for (int64_t k = 0; k < r; ++k) {
            const int64_t j = active ? k : indices[k];
            value[j] = value[j] * shrink - size[k] * a.direction(g[j], m[k], v[k], unbias[k]);
        }
        if (active && w) scatter(value, indices, r, w);
    }
}

// Copies `count` rows (columns) into a weight that goes across, a cache line of each at a time.
void write_across(const Weight& x, const Matrix<float>& values, const int64_t* indices, int64_t count, const Team& team) {
    const int64_t row = x.in_rows ? values.stride : 1, step = x.in_rows ? 1 : values.stride;
    const int64_t weight_row = x.in_rows ? 1 : x.weight.stride, weight_step = x.in_rows ? x.weight.stride : 1;
    const int64_t end = team.end(x.width);
    for (int64_t from = team.begin(x.width); from < end; from += 16)
        for (int64_t k = 0, to = from + 16 < end ? from + 16 : end; k < count; ++k)
            for (int64_t j = from; j < to; ++j)
                x.weight.first[indices[k] * weight_row + j * weight_step] = values.first[k * row + j * step];
}

void step_one(const Weight& weight, const Adam& a, const Team& team) {
    Weight x = weight;
    if (x.across) x.weight = {};
    const Coefficients c(x, a);
    if (x.explores)
        step_and_explore(x, c, a, team);
    else if (x.in_rows)
        x.values ? step_rows<true>(x, c, a, team) : step_rows<false>(x, c, a, team);
    else
        x.values ? step_columns<true>(x, c, a, team) : step_columns<false>(x, c, a, team);
    if (!x.across) return;
    team.wait();  // until all threads have stepped their part
    write_across(weight, x.values, x.indices, x.r, team);
    if (x.explored_values) write_across(weight, x.explored_values, x.explored, x.q, team);
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
