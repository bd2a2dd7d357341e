#include "launch/report/nnls.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <utility>

namespace lockstep {

namespace {

using Vector = std::vector<double>;

double Dot(const Vector& a, const Vector& b) {
  double sum = 0;
  for (size_t i = 0; i < a.size(); ++i) sum += a[i] * b[i];
  return sum;
}

// An orthonormal basis of the columns, by Gram and Schmidt, each step done twice (which makes it as
// accurate as Householder's). `r[j]` are the coefficients of column j in the basis.
struct OrthogonalBasis {
  std::vector<Vector> q;
  std::vector<Vector> r;

  // What is left of `v` when the basis is taken out.
  Vector Reduce(Vector v, Vector* coefficients) const {
    coefficients->assign(q.size(), 0);
    for (int pass = 0; pass < 2; ++pass) {
      for (size_t k = 0; k < q.size(); ++k) {
        const double c = Dot(q[k], v);
        (*coefficients)[k] += c;
        for (size_t i = 0; i < v.size(); ++i) v[i] -= c * q[k][i];
      }
    }
    return v;
  }

  void Add(const Vector& column) {
    Vector coefficients;
    Vector rest = Reduce(column, &coefficients);
    const double norm = std::sqrt(Dot(rest, rest));
    coefficients.push_back(norm);
    for (double& value : rest) value = norm > 0 ? value / norm : 0;
    q.push_back(std::move(rest));
    r.push_back(std::move(coefficients));
  }
};

// Unbounded least squares on the columns that `in` names; the other coefficients are 0.
Vector LeastSquares(const std::vector<Vector>& columns, const Vector& b,
                    const std::vector<size_t>& in) {
  OrthogonalBasis basis;
  for (const size_t j : in) basis.Add(columns[j]);
  Vector right;
  basis.Reduce(b, &right);
  Vector x(columns.size(), 0);
  for (size_t k = in.size(); k-- > 0;) {
    double value = right[k];
    for (size_t later = k + 1; later < in.size(); ++later) {
      value -= basis.r[later][k] * x[in[later]];
    }
    x[in[k]] = basis.r[k][k] > 0 ? value / basis.r[k][k] : 0;
  }
  return x;
}

Vector Residual(const std::vector<Vector>& columns, const Vector& b, const Vector& x) {
  Vector rest = b;
  for (size_t j = 0; j < columns.size(); ++j) {
    for (size_t i = 0; i < rest.size(); ++i) rest[i] -= x[j] * columns[j][i];
  }
  return rest;
}

}  // namespace

std::vector<double> NonNegativeLeastSquares(const std::vector<std::vector<double>>& columns,
                                            const std::vector<double>& b) {
  Vector x(columns.size(), 0);
  std::vector<size_t> in;  // columns that may be above 0
  // Ends after finitely many rounds in exact arithmetic; the bound is for rounding.
  for (size_t round = 0; round < 10 * columns.size() + 10; ++round) {
    const Vector rest = Residual(columns, b, x);
    size_t best = columns.size();
    double steepest = 1e-12 * std::sqrt(Dot(b, b));
    for (size_t j = 0; j < columns.size(); ++j) {
      if (std::find(in.begin(), in.end(), j) != in.end()) continue;
      const double slope = Dot(columns[j], rest);
      if (slope > steepest) steepest = slope, best = j;
    }
    if (best == columns.size()) return x;
    in.push_back(best);
    while (true) {
      const Vector wanted = LeastSquares(columns, b, in);
      // As far towards `wanted` as no coefficient turns negative.
      double step = 1;
      for (const size_t j : in) {
        if (wanted[j] <= 0) step = std::min(step, x[j] > 0 ? x[j] / (x[j] - wanted[j]) : 0.0);
      }
      for (const size_t j : in) x[j] += step * (wanted[j] - x[j]);
      if (step == 1) break;
      std::erase_if(in, [&](size_t j) {
        if (wanted[j] > 0 || x[j] > 1e-14) return false;
        x[j] = 0;
        return true;
      });
      if (in.empty()) break;
    }
  }
  return x;
}

double UnexplainedShare(const std::vector<double>& column,
                        const std::vector<std::vector<double>>& others) {
  const double norm = std::sqrt(Dot(column, column));
  if (norm == 0) return 0;
  OrthogonalBasis basis;
  for (const Vector& other : others) basis.Add(other);
  Vector coefficients;
  const Vector rest = basis.Reduce(column, &coefficients);
  return std::sqrt(Dot(rest, rest)) / norm;
}

}  // namespace lockstep
