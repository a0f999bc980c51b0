// The residual of a float32 weight: rows that were not chosen move along their gradient. Formulas in steps/residual.py.
// Two passes over the gradient, one over the weight.

#include <cmath>
#include <cstdint>
#include <vector>

namespace {

// What the residual needs to know of the chosen rows: r of them, in row-major matrices.
struct Chosen {
    const float *exp_avg, *exp_avg_sq;
    const int64_t* indices;
    std::vector<float> unbias, denominator;  // of each: 1 / (1 - beta1^t) and sqrt(1 - beta2^t)
    int64_t r;
    float eps;

    // AdamW's direction at entry `at` of the moments, which is in chosen row k.
    float direction(int64_t at, int64_t k) const {
        return exp_avg[at] * unbias[k] / (std::sqrt(exp_avg_sq[at]) / denominator[k] + eps);
    }
};

float quotient(double squares, double by) { return by > 0 ? static_cast<float>(std::sqrt(squares / by)) : 0.0f; }

// Adds to `sums` what every thread has, in the order of the threads.
void add_up(const std::vector<std::vector<float>>& parts, std::vector<double>& sums) {
    for (const auto& part : parts)
        for (size_t j = 0; j < part.size(); ++j) sums[j] += part[j];
}

double mean_length(const std::vector<double>& squares) {
    double total = 0;
    for (double square : squares) total += std::sqrt(square);
    return total / squares.size();
}

// Rows of a weight (m, n), chosen rows (r, n).
void rows(float* weight, const float* grad, const Chosen& c, int64_t m, int64_t n, float size, int threads) {
    std::vector<std::vector<float>> direction(threads), gradient(threads);
    std::vector<double> lengths(c.r), direction_sums(n), gradient_sums(n);
    std::vector<float> factors(n);
    std::vector<char> chosen(m);
    for (int64_t k = 0; k < c.r; ++k) chosen[c.indices[k]] = 1;
#pragma omp parallel for schedule(static, 1) num_threads(threads)
    for (int thread = 0; thread < threads; ++thread) {
        float* d = (direction[thread] = std::vector<float>(n)).data();
        float* g = (gradient[thread] = std::vector<float>(n)).data();
        for (int64_t k = c.r * thread / threads; k < c.r * (thread + 1) / threads; ++k) {
            const float* row = grad + c.indices[k] * n;
            float length = 0;
#pragma omp simd reduction(+ : length)
            for (int64_t j = 0; j < n; ++j) {
                const float value = c.direction(k * n + j, k);
                length += value * value;
                d[j] += value * value;
                g[j] += row[j] * row[j];
            }
            lengths[k] = length;
        }
    }
    add_up(direction, direction_sums);
    add_up(gradient, gradient_sums);
    for (int64_t j = 0; j < n; ++j) factors[j] = quotient(direction_sums[j], gradient_sums[j]);
    const double mean = mean_length(lengths);
    const float* phi = factors.data();
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int64_t i = 0; i < m; ++i) {
        if (chosen[i]) continue;
        const float* g = grad + i * n;
        float* w = weight + i * n;
        float square = 0;
#pragma omp simd reduction(+ : square)
        for (int64_t j = 0; j < n; ++j) square += phi[j] * g[j] * (phi[j] * g[j]);
        const float step = size * quotient(mean * mean, square);
#pragma omp simd
        for (int64_t j = 0; j < n; ++j) w[j] -= step * (phi[j] * g[j]);
    }
}

// Columns of a weight (m, n), chosen columns (m, r).
void columns(float* weight, const float* grad, const Chosen& c, int64_t m, int64_t n, float size, int threads) {
    std::vector<std::vector<float>> lengths(threads), squares(threads);
    std::vector<double> length_sums(c.r), square_sums(n);
    std::vector<float> factors(m), steps(n);
#pragma omp parallel for schedule(static, 1) num_threads(threads)
    for (int thread = 0; thread < threads; ++thread) {
        float* length = (lengths[thread] = std::vector<float>(c.r)).data();
        float* square = (squares[thread] = std::vector<float>(n)).data();
        for (int64_t i = m * thread / threads; i < m * (thread + 1) / threads; ++i) {
            const float* g = grad + i * n;
            float direction = 0, gradient = 0;
            for (int64_t j = 0; j < n; j += 16) __builtin_prefetch(g + n + j);  // read out of order just below
#pragma omp simd reduction(+ : direction, gradient)
            for (int64_t k = 0; k < c.r; ++k) {
                const float value = c.direction(i * c.r + k, k), chosen = g[c.indices[k]];
                direction += value * value;
                gradient += chosen * chosen;
                length[k] += value * value;
            }
            const float phi = factors[i] = quotient(direction, gradient);
#pragma omp simd
            for (int64_t j = 0; j < n; ++j) square[j] += phi * g[j] * (phi * g[j]);
        }
    }
    add_up(lengths, length_sums);
    add_up(squares, square_sums);
    const double mean = mean_length(length_sums);
    for (int64_t j = 0; j < n; ++j) steps[j] = size * quotient(mean * mean, square_sums[j]);
    for (int64_t k = 0; k < c.r; ++k) steps[c.indices[k]] = 0;
    const float* step = steps.data();
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int64_t i = 0; i < m; ++i) {
        const float phi = factors[i];
        const float* g = grad + i * n;
        float* w = weight + i * n;
#pragma omp simd
        for (int64_t j = 0; j < n; ++j) w[j] -= step[j] * (phi * g[j]);
    }
}

}  // namespace

extern "C" void residual(float* weight, const float* grad, const float* exp_avg, const float* exp_avg_sq,
                         const int64_t* indices, const float* ages, double age, double log_beta1, double log_beta2,
                         int64_t r, int64_t m, int64_t n, int in_columns, float eps, float size, int threads) {
    Chosen chosen{exp_avg, exp_avg_sq, indices, {}, {}, r, eps};
    for (int64_t k = 0; k < r; ++k) {
        const double t = ages ? ages[k] : age;  // Adam steps of each row, or of all
        chosen.unbias.push_back(static_cast<float>(1 / -std::expm1(t * log_beta1)));
        chosen.denominator.push_back(static_cast<float>(std::sqrt(-std::expm1(t * log_beta2))));
    }
    if (m * n < 1 << 16) threads = 1;  // starting more would cost more than the arithmetic
    (in_columns ? columns : rows)(weight, grad, chosen, m, n, size, threads);
}
