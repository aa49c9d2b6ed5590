// SPDX-License-Identifier: Apache-2.0
#include "flags/flags.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <numeric>
#include <string_view>
#include <system_error>
#include <utility>

namespace denoised::flags {
namespace {

std::string Spaced(const std::string& unit) { return unit.empty() ? "" : unit + " "; }

/// A number that is all of `text`, in base 10. +5 is 5, as for CLI11.
template <typename Value>
std::errc Parse(std::string_view text, Value* value) {
  if (text.starts_with('+')) text.remove_prefix(1);
  const auto [read, error] = std::from_chars(text.data(), text.data() + text.size(), *value);
  if (error != std::errc()) return error;
  return read == text.data() + text.size() ? std::errc() : std::errc::invalid_argument;
}

/// A number that is `good`; what else is given "is not …", as `wrong` says.
template <typename Value, typename Good>
CLI::Validator Number(Good good, const std::string& wrong, const std::string& description) {
  return CLI::Validator(
      [good, wrong](const std::string& text) {
        Value number = 0;
        if (Parse(text, &number) == std::errc() && good(number)) return std::string();
        return fmt::format("{} {}", text, wrong);
      },
      description);
}

/// "a, b or c".
std::string Either(const std::vector<std::string>& words) {
  if (words.size() < 2) return fmt::format("{}", fmt::join(words, ""));
  return fmt::format("{} or {}", fmt::join(words.begin(), words.end() - 1, ", "), words.back());
}

/// What is wrong with a number that CLI11 would not read in base 10; empty if nothing is.
std::string NotDecimal(const std::string& text, bool integer) {
  const size_t begin = std::min(text.find_first_not_of(" \t\n\v\f\r"), text.size());
  const bool signs = begin < text.size() && (text[begin] == '-' || text[begin] == '+');
  const std::string sign = signs && text[begin] == '-' ? "-" : "";
  const std::string_view digits = std::string_view(text).substr(begin + (signs ? 1 : 0));
  if (digits.size() < 2 || digits[0] != '0') return "";
  const auto letter = static_cast<char>(digits[1] | 0x20);  // in lower case
  if (const int base = letter == 'x' ? 16 : letter == 'b' && integer ? 2 : 0; base > 0) {
    uint64_t value = 0;
    const char* const end = digits.data() + digits.size();
    const auto [read, error] = std::from_chars(digits.data() + 2, end, value, base);
    const bool whole = error == std::errc() && read == end;
    return fmt::format("{} is not decimal; write {}", text,
                       whole ? sign + std::to_string(value) : "a decimal number");
  }
  // 010 as FLOAT is ten to everybody.
  if (!integer || digits.find_first_not_of("0123456789") != std::string_view::npos) return "";
  const size_t first = std::min(digits.find_first_not_of('0'), digits.size() - 1);
  return fmt::format("{} begins with a zero, which could mean octal; write {}{}", text, sign,
                     digits.substr(first));
}

std::string TooLarge(const std::string& text) {
  return text.starts_with('-') ? fmt::format("{} is too small; use a larger whole number", text)
                               : fmt::format("{} is too large; use a smaller whole number", text);
}

std::string WrongNumber(const std::string& text, bool integer) {
  if (text.empty()) return "the value is empty; use a number";
  if (std::string wrong = NotDecimal(text, integer); !wrong.empty()) return wrong;
  // What is no number at all is refused later.
  if (int64_t whole = 0; integer && Parse(text, &whole) == std::errc::result_out_of_range)
    return TooLarge(text);
  double number = 0;
  if (!CLI::detail::lexical_cast(text, number)) return "";
  if (!std::isfinite(number)) return fmt::format("{} is not a finite number; use one", text);
  // 1e-400 would be 0, which often means something else.
  const std::string digits = text.substr(0, text.find_first_of("eE"));
  const bool lost = number == 0 && digits.find_first_of("123456789") != std::string::npos;
  return lost ? fmt::format("{} is too near to 0; use 0, or another number", text) : "";
}

std::string WrongUnsigned(const std::string& text) {
  if (text.empty()) return "the value is empty; use a number";
  if (std::string wrong = NotDecimal(text, /*integer=*/true); !wrong.empty()) return wrong;
  uint64_t number = 0;
  if (Parse(text, &number) == std::errc()) return "";
  return fmt::format("{} is not a whole number from 0 to {}; use one", text, UINT64_MAX);
}

/// The command that was given, or its parent: the last that is known. Without commands, `app`.
const CLI::App* CommandOf(const CLI::App& app) {
  const CLI::App* command = &app;
  while (!command->get_subcommands().empty()) command = command->get_subcommands().front();
  return command;
}

/// The commands below `app` that help and completion show.
std::vector<const CLI::App*> ShownCommands(const CLI::App& app) {
  return app.get_subcommands([](const CLI::App* each) { return !each->get_group().empty(); });
}

/// The option of this name, of the command that was given or of those above it.
const CLI::Option* Find(const CLI::App& app, const std::string& name) {
  const CLI::Option* option = nullptr;
  for (const CLI::App* at = CommandOf(app); at != nullptr && option == nullptr;
       at = at->get_parent())
    option = at->get_option_no_throw(name);
  return option;
}

/// The number of letters to insert, remove or change (Levenshtein) to make `b` of `a`.
size_t Distance(std::string_view a, std::string_view b) {
  std::vector<size_t> row(b.size() + 1);
  std::iota(row.begin(), row.end(), 0);
  for (size_t i = 1; i <= a.size(); ++i) {
    size_t diagonal = std::exchange(row[0], i);
    for (size_t j = 1; j <= b.size(); ++j) {
      const size_t changed = diagonal + (a[i - 1] != b[j - 1] ? 1 : 0);
      diagonal = std::exchange(row[j], std::min({row[j] + 1, row[j - 1] + 1, changed}));
    }
  }
  return row[b.size()];
}

constexpr char kMark = '\0';  // no argument has it

void TakeMarkOff(std::string& text) {
  if (text.ends_with(kMark)) text.pop_back();
}

bool TakesWords(const CLI::App& command) {
  const std::vector<const CLI::Option*> options = command.get_options();
  return std::any_of(options.begin(), options.end(), [](const CLI::Option* option) {
    return option->get_positional() && option->get_allow_extra_args();
  });
}

bool HasOption(const CLI::App& command, const std::string& name) {
  const CLI::Option* const option = command.get_option_no_throw(name);
  return option != nullptr && !option->get_group().empty();
}

/// Adds the commands below `parent` that have the option, as they are called ("jobs list").
void AddCommandsWith(const std::string& name, const CLI::App& parent, const std::string& path,
                     std::vector<std::string>* found) {
  for (const CLI::App* command : ShownCommands(parent)) {
    const std::string called = path + command->get_name();
    if (HasOption(*command, name)) found->push_back(called);
    AddCommandsWith(name, *command, called + " ", found);
  }
}
std::vector<std::string> CommandsWith(const std::string& name, const CLI::App& app) {
  std::vector<std::string> found;
  AddCommandsWith(name, app, "", &found);
  return found;
}

std::string NameOf(const std::string& option) { return option.substr(0, option.find('=')); }

/// What is wrong with an option that the command does not have, or not at this place.
std::string UnknownOption(const CLI::App& app, const std::string& given) {
  const std::string name = NameOf(given);
  const CLI::App* const command = CommandOf(app);
  if (HasOption(*command, name)) return fmt::format("{} must follow {}", name, command->get_name());
  const std::vector<std::string> others = CommandsWith(name, app);
  if (!others.empty()) {
    return fmt::format("{} is no option of {}, but of {}", name, command->get_name(),
                       fmt::join(others, ", "));
  }
  std::string close;
  size_t least = std::min<size_t>(2, (name.size() - 1) / 3) + 1;  // of a few letters all are near
  for (const CLI::App* at = command; at != nullptr; at = at->get_parent()) {
    for (const CLI::Option* option : at->get_options()) {
      for (const std::string& known : option->get_lnames()) {
        const size_t distance = Distance(name, "--" + known);
        if (!option->get_group().empty() && distance < least) least = distance, close = known;
      }
    }
  }
  return fmt::format("{} is no option{}", name,
                     close.empty() ? "" : fmt::format("; did you mean --{}?", close));
}

/// "Could not convert: --steps = 1.5", with what the option takes.
std::string NotConverted(const CLI::App& app, const std::string& what) {
  constexpr std::string_view kBegin = "Could not convert: ";
  const size_t equals = what.find(" = ");
  if (!what.starts_with(kBegin) || equals == std::string::npos) return what;
  const std::string name = what.substr(kBegin.size(), equals - kBegin.size());
  const CLI::Option* const option = Find(app, name);
  // Of an option that is given several times CLI11 tells all values, of which the last one counts.
  const bool last = option != nullptr && !option->results().empty() &&
                    option->get_multi_option_policy() == CLI::MultiOptionPolicy::TakeLast;
  const std::string value = last ? option->results().back() : what.substr(equals + 3);
  if (option != nullptr && option->get_items_expected_max() == 0)
    return fmt::format("{}: {} is neither true nor false; use one of them", name, value);
  const std::string type = option == nullptr ? "" : option->get_type_name();
  if (!type.starts_with("INT") && !type.starts_with("UINT"))
    return fmt::format("{}: {} is not a number; use one", name, value);
  const size_t digits = value.find_first_of("+-") == 0 ? 1 : 0;
  const bool whole =
      value.size() > digits && value.find_first_not_of("0123456789", digits) == std::string::npos;
  return fmt::format("{}: {}", name,
                     whole ? TooLarge(value) : value + " is not a whole number; use one");
}

/// "--steps: At Most 1 required but received 2", "--steps: 1 required INT missing".
std::string WrongCount(const std::string& what) {
  constexpr std::string_view kOnce = ": At Most 1 required but received ";
  const size_t at = what.find(kOnce);
  if (at != std::string::npos)
    return fmt::format("{} is given {} times; give it once", what.substr(0, at),
                       what.substr(at + kOnce.size()));
  const size_t colon = what.find(": ");
  const bool missing = what.ends_with(" missing") || what.ends_with(" required but received 0");
  if (!missing || colon == std::string::npos) return what;
  return fmt::format("{} has no value; give one", what.substr(0, colon));
}

/// "a excludes b" as "a and b exclude each other", which says more to those who gave both.
std::string Excluded(const std::string& what) {
  constexpr std::string_view kExcludes = " excludes ";
  const size_t at = what.find(kExcludes);
  if (at == std::string::npos) return what;
  return fmt::format("{} and {} cannot be given together; leave one out", what.substr(0, at),
                     what.substr(at + kExcludes.size()));
}

std::string Needed(const std::string& what) {
  constexpr std::string_view kRequires = " requires ";
  const size_t at = what.find(kRequires);
  if (at == std::string::npos) return what;
  const std::string other = what.substr(at + kRequires.size());
  return fmt::format("{} is only for {}; give both", what.substr(0, at), other);
}

/// "file was not readable (missing?)", of the only file that CLI11 reads by itself.
std::string Unreadable(const CLI::App& app, const std::string& what) {
  constexpr std::string_view kMissing = " was not readable (missing?)";
  if (!what.ends_with(kMissing) || app.get_config_ptr() == nullptr) return what;
  return fmt::format("{}: {} cannot be read; name a file that is there",
                     app.get_config_ptr()->get_name(),
                     what.substr(0, what.size() - kMissing.size()));
}

/// A word that is no command, or a command or an argument that is missing.
std::string Missing(const CLI::App& app, const std::vector<std::string>& rest,
                    const std::string& what) {
  constexpr std::string_view kRequired = " is required";
  std::vector<std::string> names;
  for (const CLI::App* each : ShownCommands(*CommandOf(app))) names.push_back(each->get_name());
  if (!names.empty()) {
    const std::string wrong = rest.empty() || rest[0].starts_with("-")
                                  ? "A command is required"
                                  : fmt::format("\"{}\" is no command", rest[0]);
    return fmt::format("{}; use {}", wrong, fmt::join(names, ", "));
  }
  if (!what.ends_with(kRequired)) return what;
  const std::string name = what.substr(0, what.size() - kRequired.size());
  const CLI::Option* const option = Find(app, name);
  if (option == nullptr) return what;
  return fmt::format("{} is missing; give it: {}", name, option->get_description());
}

}  // namespace

CLI::Validator OneOf(const std::vector<std::string>& words) {
  return CLI::Validator(
      [words](const std::string& text) {
        if (std::find(words.begin(), words.end(), text) != words.end()) return std::string();
        return fmt::format("\"{}\" is unknown; use {}", text, Either(words));
      },
      fmt::format("{{{}}}", fmt::join(words, ",")));
}

CLI::Validator Between(double low, double high, const std::string& unit) {
  return Number<double>([=](double number) { return number >= low && number <= high; },
                        fmt::format("is not a number from {} to {}; use one", low, high),
                        fmt::format("{}[{} - {}]", Spaced(unit), low, high));
}

CLI::Validator Between(int64_t low, int64_t high) {
  return Number<int64_t>([=](int64_t number) { return number >= low && number <= high; },
                         fmt::format("is not a whole number from {} to {}; use one", low, high),
                         fmt::format("[{} - {}]", low, high));
}

CLI::Validator ZeroOr(double low, double high, const std::string& unit) {
  return Number<double>(
      [=](double number) { return number == 0 || (number >= low && number <= high); },
      fmt::format("is neither 0 nor a number from {} to {}; use one of these", low, high),
      fmt::format("{}0 or [{} - {}]", Spaced(unit), low, high));
}

void CheckNumbers(CLI::App& app) {
  const CLI::Validator check_unsigned([](std::string& text) { return WrongUnsigned(text); }, "");
  const CLI::Validator integer(
      [](std::string& text) { return WrongNumber(text, /*integer=*/true); }, "");
  const CLI::Validator real([](std::string& text) { return WrongNumber(text, /*integer=*/false); },
                            "");
  const CLI::Validator word(
      [](std::string& text) {
        TakeMarkOff(text);
        return std::string();
      },
      "");
  // transform() puts it before other checks, whose messages for 08 would have no remedy.
  for (CLI::Option* const option : app.get_options({})) {
    const std::string type = option->get_type_name();
    if (type.starts_with("UINT")) option->transform(check_unsigned);
    if (type.starts_with("INT")) option->transform(integer);
    if (type.starts_with("FLOAT")) option->transform(real);
    if (option->get_positional()) option->transform(word);
  }
  for (CLI::App* const command : app.get_subcommands({})) CheckNumbers(*command);
}

std::vector<std::string> ForCli11(const CLI::App& app, const std::vector<std::string>& arguments) {
  std::vector<std::string> all;
  const CLI::App* command = &app;
  bool options = true;    // until "--"
  bool is_value = false;  // of the option before
  for (const std::string& text : arguments) {
    if (std::exchange(is_value, false)) {
      all.push_back(text);
      continue;
    }
    options = options && text != "--";
    const auto named = [&](const CLI::App* each) { return each->check_name(text); };
    for (const CLI::App* each : command->get_subcommands(named)) command = each;
    const size_t equals = text.find('=');
    const CLI::Option* option = nullptr;
    if (options && text.starts_with("-")) {
      for (const CLI::App* at = command; at != nullptr && option == nullptr; at = at->get_parent())
        option = at->get_option_no_throw(text.substr(0, equals));
    }
    const bool takes_value = option != nullptr && option->get_items_expected_max() > 0;
    const bool is_empty = takes_value && text.starts_with("--") && equals + 1 == text.size();
    is_value = takes_value && equals == std::string::npos;
    all.push_back(is_empty ? text.substr(0, equals) : text);
    if (is_empty) all.emplace_back();
    if (text.starts_with('[') && text.ends_with(']') && TakesWords(*command)) all.back() += kMark;
  }
  return all;
}

std::string Explain(const CLI::App& app, const CLI::Error& error) {
  std::string what = error.what();
  const std::string kind = error.get_name();
  std::vector<std::string> rest = app.remaining(/*recurse=*/true);
  std::for_each(rest.begin(), rest.end(), TakeMarkOff);
  const auto option = std::find_if(rest.begin(), rest.end(), [](const std::string& text) {
    return text.size() > 1 && text.starts_with("-");
  });
  const bool is_unknown = option != rest.end() && *option != "--";
  // CLI11 names this error after the command, so its exit code tells what it is. It lists all that
  // it did not expect, the values of an unknown option too.
  if (error.get_exit_code() == static_cast<int>(CLI::ExitCodes::ExtrasError)) {
    if (is_unknown) return UnknownOption(app, *option);
    return rest.empty() ? what
                        : fmt::format("\"{}\" is one argument too many; leave it out", rest[0]);
  }
  if (kind == "ConversionError") return NotConverted(app, what);
  if (kind == "ArgumentMismatch") return WrongCount(what);
  if (kind == "ExcludesError") return Excluded(what);
  if (kind == "RequiresError") return Needed(what);
  if (kind == "FileError") return Unreadable(app, what);
  if (kind != "RequiredError") return what;
  const bool first = is_unknown && option == rest.begin();
  if (first && !ShownCommands(*CommandOf(app)).empty() &&
      CommandsWith(NameOf(*option), app).empty())
    return UnknownOption(app, *option);
  return Missing(app, rest, what);
}

}  // namespace denoised::flags
