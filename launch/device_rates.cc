#include "launch/device_rates.h"

#include <algorithm>
#include <iterator>

#include "model/json_fields.h"
#include "runtime/core/file.h"

namespace lockstep {

namespace {

struct Field {
  const char* key;
  double DeviceRates::*member;
};
constexpr Field kFields[] = {
    {"memory_bytes", &DeviceRates::memory_bytes},
    {"weight_bytes_per_second", &DeviceRates::weight_bytes_per_second},
    {"kv_bytes_per_second", &DeviceRates::kv_bytes_per_second},
    {"product_flops", &DeviceRates::product_flops},
    {"attention_flops", &DeviceRates::attention_flops},
    {"sum_seconds", &DeviceRates::sum_seconds},
    {"link_bytes_per_second", &DeviceRates::link_bytes_per_second},
    {"step_seconds", &DeviceRates::step_seconds},
};

// Chosen so that predicted steps of Qwen2.5-7B's shape on one and two of them agree with measured
// ones; tests/bench/RESULTS.md, "Predicted steps", has both.
DeviceRates H200() {
  return {.name = "h200",
          .memory_bytes = 143771.0 * (1 << 20),
          .weight_bytes_per_second = 4.0e12,
          .kv_bytes_per_second = 3.2e12,
          .product_flops = 660e12,
          .attention_flops = 560e12,
          .sum_seconds = 5e-6,
          .link_bytes_per_second = 400e9,
          .step_seconds = 150e-6};
}

}  // namespace

absl::StatusOr<DeviceRates> ReadDeviceRates(const std::string& name_or_file) {
  if (name_or_file == "h200") return H200();
  const absl::StatusOr<std::string> text = ReadFile(name_or_file);
  if (!text.ok()) {
    return absl::InvalidArgumentError(
        absl::StrFormat("%s; built in: h200", text.status().message()));
  }
  LOCKSTEP_ASSIGN_OR_RETURN(const Json json, ParseJson(*text, name_or_file));
  if (!json.is_object()) {
    return absl::InvalidArgumentError(name_or_file + ": it must be a JSON object");
  }
  JsonFields fields(json, name_or_file);
  DeviceRates rates;
  rates.name = fields.String("name").value_or(name_or_file);
  // Far beyond any device, near enough for what is computed of them to stay a number.
  constexpr double kMost = 1e21;
  for (const Field& field : kFields) {
    rates.*field.member = fields.RequiredDouble(field.key, 0, kMost);
  }
  for (const Field& field : kFields) {
    const bool divides =
        field.member != &DeviceRates::sum_seconds && field.member != &DeviceRates::step_seconds;
    if (fields.status().ok() && divides && !(rates.*field.member >= 1)) {
      fields.Fail(std::string(field.key) + " must be 1 or more");
    }
  }
  if (rates.name.empty() || std::any_of(rates.name.begin(), rates.name.end(), [](char c) {
        return static_cast<unsigned char>(c) < 0x20;
      })) {
    fields.Fail("name must be a text without control characters");
  }
  for (const auto& [key, value] : json.items()) {
    const bool known =
        key == "name" || std::any_of(std::begin(kFields), std::end(kFields),
                                     [&key](const Field& f) { return key == f.key; });
    if (!known) fields.Fail("unknown key " + key);
  }
  LOCKSTEP_RETURN_IF_ERROR(fields.status());
  return rates;
}

OrderedJson DeviceRatesJson(const DeviceRates& rates) {
  OrderedJson json;
  json["name"] = rates.name;
  for (const Field& field : kFields) json[field.key] = rates.*field.member;
  return json;
}

}  // namespace lockstep
