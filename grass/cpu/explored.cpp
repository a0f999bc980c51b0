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
    const bool active(x.values);
    const float shrink = x.shrink;
    Sums& mine = team.sums[team.thread] = {std::vector<float>(n), std::vector<float>(n), 0.0};
    float *updates = mine.updates.data(), *gradients = mine.gradients.data();
    for (int64_t k = team.begin(x.r); k < team.end(x.r); ++k) {
        const float *g = x.grad[active ? k : x.indices[k]], size = c.step_size[k], unbias = c.unbias[k];
        float* w = x.weight ? x.weight[x.indices[k]] : nullptr;
        float *value = active ? x.values[k] : w, *exp_avg = x.exp_avg[k], *exp_avg_sq = x.exp_avg_sq[k];
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
        const float* g = active ? x.explored_grad[k] : x.grad[others[k]];
        float* w = x.weight ? x.weight[others[k]] : nullptr;
        float *value = active ? x.explored_values[k] : w, square = 0;
        if (k + 1 < count) {  // the next row
            prefetch(active ? x.explored_values[k + 1] : x.weight[others[k + 1]], n);
            prefetch(active ? x.explored_grad[k + 1] : x.grad[others[k + 1]], n);
        }
#pragma omp simd reduction(+ : square)
        for (int64_t j = 0; j < n; ++j) square += phi[j] * g[j] * (phi[j] * g[j]);
        const float step = a.sign * over_root(mean * x.reach, static_cast<double>(square)), shrink = x.explored_shrink;
#pragma omp simd
        for (int64_t j = 0; j < n; ++j) value[j] = value[j] * shrink - step * (phi[j] * g[j]);
        if (active && w) std::copy(value, value + n, w);
    }
}

// A part of the rows of a weight whose columns are selected and explored, as one thread steps it.
class Columns {
    const Weight& x;
    const Coefficients& c;
    const Adam& a;
    const Team& team;
    const int64_t from, to, q;  // rows that are this thread's; columns that may move without state
    Sums& mine;
    std::vector<float> factors;  // phi of each row

  public:
    Columns(const Weight& x, const Coefficients& c, const Adam& a, const Team& team)
        : x(x), c(c), a(a), team(team), from(team.begin(x.width)), to(team.end(x.width)), q(x.values ? x.q : x.total),
          mine(team.sums[team.thread] = {std::vector<float>(x.r), std::vector<float>(q), 0.0}), factors(to - from) {}

    // The gradient is read twice, the weight once.
    void whole() {
        const int64_t n = x.total, r = x.r, *indices = x.indices;
        std::vector<float> compact((to - from) * r);  // chosen entries: their gradients, then updates
        const auto gather = [&](int64_t i) {
            const float* g = x.grad[i];
            float* chosen = compact.data() + (i - from) * r;
            for (int64_t k = 0; k < r; ++k) chosen[k] = g[indices[k]];
        };
        if (from < to) gather(from);
        for (int64_t i = from; i < to; ++i) {
            if (i + 1 < to) gather(i + 1);  // a row ahead: what has just been stored is slow to load
            prefetch(x.grad[i + 2], n);
            if (x.is_small()) prefetch(x.weight[i], n);  // still in cache when its turn comes
            float* chosen = compact.data() + (i - from) * r;
            direct(i, chosen, chosen);
            sum_squares(i, x.grad[i]);
        }
        const std::vector<float> of_others = lengths();
        std::vector<float> steps(n), shrinks(n, 1);
        for (int64_t j : explored_rows(x)) {
            steps[j] = of_others[j];
            shrinks[j] = x.explored_shrink;
        }
        for (int64_t i = from; i < to; ++i) {
            const float *update = compact.data() + (i - from) * r, shrink = x.shrink;
            float* w = x.weight[i];
            move(i, x.grad[i], steps.data(), shrinks.data(), w);
            for (int64_t k = 0; k < r; ++k) w[indices[k]] = w[indices[k]] * shrink - update[k];
        }
    }

    // Rows are written into the weight when all their columns have been stepped, so that it is read once.
    void active() {
        std::vector<float> updates(x.r);
        for (int64_t i = from; i < to; ++i) {
            float *value = x.values[i], *update = updates.data();
            direct(i, x.grad[i], update);
            const float shrink = x.shrink;
#pragma omp simd
            for (int64_t k = 0; k < x.r; ++k) value[k] = value[k] * shrink - update[k];
            sum_squares(i, x.explored_grad[i]);
        }
        const std::vector<float> steps = lengths(), shrinks(q, x.explored_shrink);
        for (int64_t i = from; i < to; ++i) {
            if (x.weight && i + 1 < to) prefetch(x.weight[i + 1], x.total);
            move(i, x.explored_grad[i], steps.data(), shrinks.data(), x.explored_values[i]);
            if (!x.weight) continue;
            scatter(x.values[i], x.indices, x.r, x.weight[i]);
            scatter(x.explored_values[i], x.explored, q, x.weight[i]);
        }
    }

  private:
    // Updates of a row's selected entries, from their gradients, which may be in the same place.
    void direct(int64_t i, const float* gradients, float* to_updates) {
        const float *size = c.step_size.data(), *unbias = c.unbias.data();
        float *exp_avg = x.exp_avg[i], *exp_avg_sq = x.exp_avg_sq[i], *updates = mine.updates.data();
        float update_sum = 0, gradient_sum = 0;
#pragma omp simd reduction(+ : update_sum, gradient_sum)
        for (int64_t k = 0; k < x.r; ++k) {
            const float gradient = gradients[k];
            const float update = size[k] * a.direction(gradient, exp_avg[k], exp_avg_sq[k], unbias[k]);
            to_updates[k] = update;
            update_sum += update * update;
            gradient_sum += gradient * gradient;
            updates[k] += update * update;
        }
        factors[i - from] = over_root(std::sqrt(update_sum), gradient_sum);
    }

    void sum_squares(int64_t i, const float* g) {
        const float phi = factors[i - from];
        float* squares = mine.gradients.data();
#pragma omp simd
        for (int64_t j = 0; j < q; ++j) squares[j] += phi * g[j] * (phi * g[j]);
    }

    void move(int64_t i, const float* g, const float* step, const float* shrink, float* values) const {
        const float phi = factors[i - from];
#pragma omp simd
        for (int64_t j = 0; j < q; ++j) values[j] = values[j] * shrink[j] - step[j] * (phi * g[j]);
    }

    // How far each column moves, over the root of its squares, when all threads have summed.
    std::vector<float> lengths() const {
        team.wait();
        const std::vector<double> updates = total(team, &Sums::updates), squares = total(team, &Sums::gradients);
        team.wait();  // until all have read what the next weight overwrites
        double mean = 0;
        for (double square : updates) mean += std::sqrt(square) / x.r;
        std::vector<float> steps(q);
        for (int64_t j = 0; j < q; ++j) steps[j] = a.sign * over_root(mean * x.reach, squares[j]);
        return steps;
    }
};

}  // namespace

void step_and_explore(const Weight& x, const Coefficients& c, const Adam& a, const Team& team) {
    if (x.in_rows)
        rows(x, c, a, team);
    else
        x.values ? Columns(x, c, a, team).active() : Columns(x, c, a, team).whole();
}
