// What kernel.cpp and explored.cpp share: a weight to step, AdamW's arithmetic on one entry, and who does what.

#pragma once
#include <cmath>
#include <cstdint>
#include <vector>

// A matrix in memory: row i begins `stride` values behind row i - 1, and the values of a row are neighbours.
template <typename Value>
struct Matrix {
    Value* first;
    int64_t stride;

    Value* operator[](int64_t i) const { return first + i * stride; }
    explicit operator bool() const { return first; }
};

// What _WEIGHT in kernel.py packs. Selected are r of `total` rows of `width` values; without `in_rows`, r of `total`
// columns of matrices `width` high. With `values` these are stepped and copied into `weight`, unless it is null, and grad
// is compact; otherwise weight and grad are whole. If it `explores`, the q rows `explored` move too, null: all that are
// not selected, after they are multiplied by `explored_shrink`; with `values` these and their gradients are matrices of
// their own. If the weight goes `across`, its rows
// are the columns of the other matrices.
struct Weight {
    Matrix<float> weight;
    Matrix<const float> grad;
    Matrix<float> values, exp_avg, exp_avg_sq;
    Matrix<const float> explored_grad;
    Matrix<float> explored_values;
    const int64_t* indices;
    const float* ages;  // Adam steps of each row; null: `age` for all
    const int64_t* explored;
    int64_t r, width, total, in_rows, across, explores, q;
    double reach, age, step_size, shrink, explored_shrink;

    bool is_small() const {  // one thread's, in its cache
        return (explores && !explored ? total : r + q) * width < 1 << 16;
    }
};

struct Adam {
    double log_beta1, log_beta2;
    float complement1, beta2, complement2, eps, sign;  // complements: 1 - beta, rounded once

    // Of one entry: updates its moments. AdamW's direction but for the bias correction of the first moment.
    float direction(float g, float& m, float& v, float unbias) const {
        g *= sign;
        m += (g - m) * complement1;
        v = v * beta2 + g * g * complement2;
        return m / (std::sqrt(v) * unbias + eps);
    }
};

// Of each chosen row: lr scale / (1 - beta1^t) and 1 / sqrt(1 - beta2^t), without cancellation.
struct Coefficients {
    std::vector<float> step_size, unbias;

    Coefficients(const Weight& x, const Adam& a) : step_size(x.r), unbias(x.r) {
        for (int64_t k = 0; k < x.r; ++k) {
            if (k > 0 && (!x.ages || x.ages[k] == x.ages[k - 1])) {
                step_size[k] = step_size[k - 1];
                unbias[k] = unbias[k - 1];
                continue;
            }
            const double age = x.ages ? x.ages[k] : x.age;
            step_size[k] = static_cast<float>(x.step_size / -std::expm1(age * a.log_beta1));
            unbias[k] = static_cast<float>(1 / std::sqrt(-std::expm1(age * a.log_beta2)));
        }
    }
};

// Sums of squares over the part of a weight that one thread has.
struct Sums {
    std::vector<float> updates, gradients;
    double lengths;
};

// The threads that step a weight together, seen from one of them.
struct Team {
    int thread, size;
    Sums* sums;  // of every thread

    int64_t begin(int64_t count) const { return count * thread / size; }
    int64_t end(int64_t count) const { return count * (thread + 1) / size; }

    void wait() const {
        if (size > 1) {
#pragma omp barrier
        }
    }
};

inline void prefetch(const float* line, int64_t count) {
    for (int64_t j = 0; j < count; j += 16) __builtin_prefetch(line + j);
}

inline void scatter(const float* values, const int64_t* indices, int64_t count, float* row) {
    for (int64_t k = 0; k < count; ++k) row[indices[k]] = values[k];
}

void step_and_explore(const Weight& x, const Coefficients& c, const Adam& a, const Team& team);
