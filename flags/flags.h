// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <CLI/CLI.hpp>
#include <concepts>
#include <cstdint>
#include <string>
#include <vector>

/// What CLI11 leaves open, for the command lines of all programs: numbers that it reads otherwise
/// than people do, and messages that name the flag, its value and a remedy.

namespace denoised::flags {

/// In place of CLI::IsMember: one of some words.
CLI::Validator OneOf(const std::vector<std::string>& words);

/// In place of CLI::Range, which takes NaN for a number in it. `unit`: in --help.
CLI::Validator Between(double low, double high, const std::string& unit = "");
/// Of whole numbers.
CLI::Validator Between(int64_t low, int64_t high);
template <std::integral Int>
CLI::Validator Between(Int low, Int high) {
  return Between(static_cast<int64_t>(low), static_cast<int64_t>(high));
}
/// 0, which has a meaning of its own, or a number as in Between().
CLI::Validator ZeroOr(double low, double high, const std::string& unit = "");

/// Adds checks to all numbers of `app` and its commands. CLI11 takes NaN and infinities for
/// numbers, and nothing for 0. It reads integers as C does, 010 as 8 and 0x10 as 16, and wraps or
/// cuts off what is too large. It also takes off the marks of ForCli11().
void CheckNumbers(CLI::App& app);

/// The arguments as CLI11 must have them: "--flag=" as "--flag" and "": CLI11 takes the next
/// argument as the value of the former. A word in brackets has a mark behind it where a command
/// takes a list of words: CLI11 takes [a,b] for a and b.
std::vector<std::string> ForCli11(const CLI::App& app, const std::vector<std::string>& arguments);

/// What is wrong with a command line that `app` has refused, and what to do. It quotes the command
/// line as it is.
std::string Explain(const CLI::App& app, const CLI::Error& error);

}  // namespace denoised::flags
