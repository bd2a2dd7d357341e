#include "launch/text_table.h"

#include <algorithm>

namespace lockstep {

std::string TextTable(const std::vector<std::vector<std::string>>& rows) {
  std::vector<size_t> widths(rows[0].size());
  for (const auto& row : rows) {
    for (size_t c = 0; c < row.size(); ++c) widths[c] = std::max(widths[c], row[c].size());
  }
  std::string text;
  for (const auto& row : rows) {
    for (size_t c = 0; c < row.size(); ++c) {
      text += c == 0 ? "" : "  ";
      text += std::string(widths[c] - row[c].size(), ' ') + row[c];
    }
    text += "\n";
  }
  return text;
}

}  // namespace lockstep
