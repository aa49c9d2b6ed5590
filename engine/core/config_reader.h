// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <initializer_list>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "engine/core/status.h"

namespace denoised {

/// Reads the typed fields of one JSON object and collects all errors in it, so that they are
/// reported at once: file, field, value, and what would be accepted. A field that is absent or null
/// keeps its default; but null where a bool is read is false, as diffusers takes it.
///
///   ConfigReader config(json, "unet/config.json");
///   config.Read("norm_eps", &eps);
///   config.Refuse("dual_cross_attention", false);     // any other value is an error
///   config.Ignore({"dropout"});                        // has no meaning at inference
///   DENOISED_RETURN_IF_ERROR(config.Finish());         // also names fields nobody read
class ConfigReader {
 public:
  ConfigReader(const nlohmann::json& object, std::string file);

  void Read(const char* field, bool* value);
  void Read(const char* field, int* value);
  void Read(const char* field, double* value);
  void Read(const char* field, std::string* value);
  void Read(const char* field, std::optional<bool>* value);
  void Read(const char* field, std::optional<int>* value);
  void Read(const char* field, std::optional<double>* value);
  void Read(const char* field, std::optional<std::string>* value);
  void Read(const char* field, std::vector<int>* value);
  void Read(const char* field, std::vector<double>* value);
  void Read(const char* field, std::vector<std::string>* value);

  /// The field's raw value (null when absent), marked as read.
  const nlohmann::json& Raw(const char* field);
  bool Has(const char* field) const;

  /// A field that is not supported: any value but `harmless`, null or absent is an error.
  void Refuse(const char* field, const nlohmann::json& harmless);
  /// For a field of which diffusers takes no null.
  void RefuseNull(const char* field);
  /// Fields that have no effect here. Fields that start with '_' are always ignored.
  void Ignore(std::initializer_list<const char*> fields);
  /// Adds an error about `field`: what is wrong, and what would be accepted.
  void Complain(const char* field, const std::string& what);

  /// Complains unless low ≤ value ≤ high.
  void CheckRange(const char* field, double value, double low, double high);

  /// OK, or InvalidArgument with all errors. A field that nobody read is one.
  absl::Status Finish();

 private:
  template <typename T>
  void ReadAs(const char* field, const char* expected, bool (nlohmann::json::*is)() const noexcept,
              T* value);
  template <typename T>
  void ReadList(const char* field, const char* expected,
                bool (nlohmann::json::*is)() const noexcept, std::vector<T>* value);
  template <typename T>
  void ReadOptional(const char* field, std::optional<T>* value);
  const nlohmann::json* Find(const char* field);

  nlohmann::json object_;
  std::string file_;
  std::set<std::string> read_;
  std::vector<std::string> complaints_;
};

/// Parses text that must be one JSON object. No object in it may give a key twice, and it may nest
/// `max_depth` deep. InvalidArgument begins with `file`.
absl::StatusOr<nlohmann::json> ParseJsonObject(std::string_view text, const std::string& file,
                                               int max_depth = 64);
/// Reads a file (at most 64 MiB) and parses it. NotFound when there is none.
absl::StatusOr<nlohmann::json> ReadJsonFile(const std::string& path);

/// A string, a number, true or false as the text of a command line's flag; nothing for other
/// values. Whole numbers may be in float notation, 8.0 or 1e+06, as templates write them.
std::optional<std::string> FlagText(const nlohmann::json& value);

}  // namespace denoised
