// Least squares with coefficients that must not be negative (Lawson and Hanson, Solving Least
// Squares Problems, 1974, chapter 23), for a handful of columns.
#pragma once

#include <vector>

namespace lockstep {

// x >= 0 with the least ||A x - b||, where A has the given columns, each as long as `b`. Columns
// should be of like size and linearly independent; of a zero column the coefficient is 0.
std::vector<double> NonNegativeLeastSquares(const std::vector<std::vector<double>>& columns,
                                            const std::vector<double>& b);

// The part of ||column|| that no combination of `others` explains: 0 to 1; 0 of a zero column.
double UnexplainedShare(const std::vector<double>& column,
                        const std::vector<std::vector<double>>& others);

}  // namespace lockstep
