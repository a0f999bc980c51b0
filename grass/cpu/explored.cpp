// The selected rows of a float32 weight stepped, and its explored rows moved. Formulas in exploration.py, with the
// selected rows' updates `lr scale D`, which are at hand, in place of `D`.

#include "kernel.h"

#include <algorithm>

namespace {

// length / sqrt(squares); 0 where it would be divided by nothing.
template <typename Real>
Real over_root(Real length, Real squares) {
    return squares > 0 ? length / std::sqrt(squares) : 0;
}

// What all threads have, in their order.
std::vector<double> total(const Team& team, std::vector<float> Sums::*part) {
    std::vector<double> sums((team.sums[0].*part).size());
    for (int thread = 0; thread < team.size; ++thread) {
        const float* squares = (team.sums[thread].*part).data();
        for (size_t j = 0; j < sums.size(); ++j) sums[j] += squares[j];
    }
    return sums;
}

// The rows that move without state: those listed, or all that are not selected.
std::vector<int64_t> explored_rows(const Weight& x) {
    if (x.explored) return {x.explored, x.explored + x.q};
    std::vector<char> selected(x.total);
    for (int64_t k = 0; k < x.r; ++k) selected[x.indices[k]] = 1;
    std::vector<int64_t> others;
    for (int64_t i = 0; i < x.total; ++i)
        if (!selected[i]) others.push_back(i);
    return others;
}

// Rows of a weight (m, n), selected rows (r, n), whole or active: gradient and weight are read once.
void rows(const Weight& x, const Coefficients& c, const Adam& a, const Team& team) {
    const int64_t n = x.width;
    const bool active = x.values;
    const float shrink = x.shrink;
    Sums& mine = team.sums[team.thread] = {std::vector<float>(n), std::vector<float>(n), 0.0};
    float *updates = mine.updates.data(), *gradients = mine.gradients.data();
    for (int64_t k = team.begin(x.r); k < team.end(x.r); ++k) {
        const float *g = x.grad + (active ? k : x.indices[k]) * n, size = c.step_size[k], unbias = c.unbias[k];
        float* w = x.weight ? x.weight + x.indices[k] * n : nullptr;
        float *value = active ? x.values + k * n : w, *exp_avg = x.exp_avg + k * n, *exp_avg_sq = x.exp_avg_sq + k * n;
        float length = 0;
#pragma omp simd reduction(+ : length)
        for (int64_t j = 0; j < n; ++j) {
            const float update = size * a.direction(g[j], exp_avg[j], exp_avg_sq[j], unbias);
            value[j] = value[j] * shrink - update;
            length += update * update;
            updates[j] += update * update;
            gradients[j] += g[j] * g[j];
        }
        if (active && w) std::copy(value, value + n, w);
        mine.lengths += std::sqrt(length);
    }
    team.wait();
    const std::vector<double> all_updates = total(team, &Sums::updates), all_gradients = total(team, &Sums::gradients);
    double mean = 0;
    for (int thread = 0; thread < team.size; ++thread) mean += team.sums[thread].lengths / x.r;
    team.wait();  // until all have read what the next weight overwrites
    std::vector<float> factors(n);
    for (int64_t j = 0; j < n; ++j) factors[j] = over_root(std::sqrt(all_updates[j]), all_gradients[j]);
    const float* phi = factors.data();
    const std::vector<int64_t> others = explored_rows(x);
    const int64_t count = others.size();
    for (int64_t k = team.begin(count); k < team.end(count); ++k) {
        const float* g = active ? x.explored_grad + k * n : x.grad + others[k] * n;
        float* w = x.weight ? x.weight + others[k] * n : nullptr;
        float *value = active ? x.explored_values + k * n : w, square = 0;
        if (k + 1 < count) {  // the next row
            prefetch(active ? value + n : x.weight + others[k + 1] * n, n);
            prefetch(active ? g + n : x.grad + others[k + 1] * n, n);
        }
#pragma omp simd reduction(+ : square)
        for (int64_t j = 0; j < n; ++j) square += phi[j] * g[j] * (phi[j] * g[j]);
        const float step = a.sign * over_root(mean * x.reach, static_cast<double>(square));
#pragma omp simd
        for (int64_t j = 0; j < n; ++j) value[j] -= step * (phi[j] * g[j]);
        if (active && w) std::copy(value, value + n, w);
    }
}

// Columns of a weight (m, n), selected columns (m, r): the gradient is read twice, the weight once.
void columns(const Weight& x, const Coefficients& c, const Adam& a, const Team& team) {
    const int64_t n = x.total, r = x.r, *indices = x.indices, from = team.begin(x.width), to = team.end(x.width);
    const float shrink = x.shrink, *size = c.step_size.data(), *unbias = c.unbias.data();
    Sums& mine = team.sums[team.thread] = {std::vector<float>(r), std::vector<float>(n), 0.0};
    float *updates = mine.updates.data(), *squares = mine.gradients.data();
    std::vector<float> compact((to - from) * r), factors(to - from);  // chosen entries: their gradients, then updates
    const auto gather = [&](int64_t i) {
        const float* g = x.grad + i * n;
        float* chosen = compact.data() + (i - from) * r;
        for (int64_t k = 0; k < r; ++k) chosen[k] = g[indices[k]];
    };
    if (from < to) gather(from);
    for (int64_t i = from; i < to; ++i) {
        if (i + 1 < to) gather(i + 1);  // a row ahead: what has just been stored is slow to load
        const float* g = x.grad + i * n;
        prefetch(g + 2 * n, n);
        if (x.is_small()) prefetch(x.weight + i * n, n);  // still in cache when its turn comes
        float *chosen = compact.data() + (i - from) * r, update_sum = 0, gradient_sum = 0;
        float *exp_avg = x.exp_avg + i * r, *exp_avg_sq = x.exp_avg_sq + i * r;
#pragma omp simd reduction(+ : update_sum, gradient_sum)
        for (int64_t k = 0; k < r; ++k) {
            const float gradient = chosen[k];
            const float update = size[k] * a.direction(gradient, exp_avg[k], exp_avg_sq[k], unbias[k]);
            chosen[k] = update;
            update_sum += update * update;
            gradient_sum += gradient * gradient;
            updates[k] += update * update;
        }
        const float phi = factors[i - from] = over_root(std::sqrt(update_sum), gradient_sum);
#pragma omp simd
        for (int64_t j = 0; j < n; ++j) squares[j] += phi * g[j] * (phi * g[j]);
    }
    team.wait();
    const std::vector<double> lengths = total(team, &Sums::updates), all_squares = total(team, &Sums::gradients);
    team.wait();  // until all have read what the next weight overwrites
    double mean = 0;
    for (double square : lengths) mean += std::sqrt(square) / r;
    std::vector<float> steps(n);
    for (int64_t j : explored_rows(x)) steps[j] = a.sign * over_root(mean * x.reach, all_squares[j]);
    const float* step = steps.data();
    for (int64_t i = from; i < to; ++i) {
        const float *g = x.grad + i * n, *update = compact.data() + (i - from) * r, phi = factors[i - from];
        float* w = x.weight + i * n;
#pragma omp simd
        for (int64_t j = 0; j < n; ++j) w[j] -= step[j] * (phi * g[j]);
        for (int64_t k = 0; k < r; ++k) w[indices[k]] = w[indices[k]] * shrink - update[k];
    }
}

}  // namespace

void step_and_explore(const Weight& x, const Coefficients& c, const Adam& a, const Team& team) {
    (x.in_rows ? rows : columns)(x, c, a, team);
}
