// A table for people: right-aligned columns, two spaces apart.
#pragma once

#include <string>
#include <vector>

namespace lockstep {

// Rows of equally many cells, the first of them the heading; a line each.
std::string TextTable(const std::vector<std::vector<std::string>>& rows);

}  // namespace lockstep
