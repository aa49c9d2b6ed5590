// SPDX-License-Identifier: Apache-2.0
#include "command/man_page.h"

#include <fmt/format.h>

#include <vector>

#include "absl/strings/ascii.h"
#include "command/files.h"

namespace denoised::command {
namespace {

/// Text that roff prints as it is.
std::string Escaped(const std::string& text) {
  std::string escaped;
  bool at_start = true;
  for (const char c : text) {
    if (at_start && (c == '.' || c == '\'')) escaped += "\\&";
    if (c == '\\') {
      escaped += "\\e";
    } else if (c == '-') {
      escaped += "\\-";  // a minus, which can be copied into a shell
    } else {
      escaped += c;
    }
    at_start = c == '\n';
  }
  return escaped;
}

/// "denoise models load".
std::string Words(const CLI::App& command) {
  const CLI::App* parent = command.get_parent();
  return parent == nullptr ? command.get_name() : Words(*parent) + " " + command.get_name();
}

/// "denoise-models-load".
std::string PageName(const CLI::App& command) {
  std::string name = Words(command);
  for (char& c : name) c = c == ' ' ? '-' : c;
  return name;
}

std::vector<const CLI::App*> Visible(const CLI::App& command) {
  return command.get_subcommands([](const CLI::App* app) { return !app->get_group().empty(); });
}

std::string Item(const CLI::Option& option) {
  const bool takes_value = option.get_items_expected_max() > 0;
  std::string text = ".TP\n";
  const std::string value = takes_value ? " \\fI" + Escaped(option.get_type_name()) + "\\fR" : "";
  if (option.get_positional() && option.get_lnames().empty() && option.get_snames().empty()) {
    text += "\\fI" + Escaped(option.get_name(true)) + "\\fR\n";
  } else {
    std::string names;
    for (const std::string& name : option.get_snames()) {
      names += (names.empty() ? "" : ", ") + ("\\fB" + Escaped("-" + name) + "\\fR");
    }
    for (const std::string& name : option.get_lnames()) {
      names += (names.empty() ? "" : ", ") + ("\\fB" + Escaped("--" + name) + "\\fR");
    }
    text += names + value + "\n";
  }
  std::string description = option.get_description();
  if (!description.empty() && description.back() != '.') description += '.';
  if (!option.get_default_str().empty())
    description += " Default: " + option.get_default_str() + ".";
  if (!option.get_envname().empty()) description += " Environment: " + option.get_envname() + ".";
  return text + Escaped(description) + "\n";
}

}  // namespace

std::string ManPage(const CLI::App& command, const std::string& version) {
  const std::string words = Words(command);
  std::string title = PageName(command);
  absl::AsciiStrToUpper(&title);
  std::string description = command.get_description();
  std::string summary = description;
  if (!summary.empty() && summary.back() == '.') summary.pop_back();
  std::string page = fmt::format(
      ".TH \"{}\" 1 \"\" \"denoised {}\" \"denoised\"\n.SH NAME\n{} \\- {}\n.SH SYNOPSIS\n.B {}\n",
      Escaped(title), version, Escaped(PageName(command)), Escaped(summary), Escaped(words));
  if (command.get_parent() == nullptr) {
    page += "[\\fIOPTION\\fR]... \\fICOMMAND\\fR [\\fIOPTION\\fR]...\n";
  } else {
    const bool optional = command.get_require_subcommand_min() == 0;
    if (!Visible(command).empty()) page += optional ? "[\\fICOMMAND\\fR]\n" : "\\fICOMMAND\\fR\n";
    page += "[\\fIOPTION\\fR]...\n";
    for (const CLI::Option* option : command.get_options()) {
      if (!option->get_positional()) continue;
      const std::string dots = option->get_items_expected_max() > 1 ? "..." : "";
      const std::string name = "\\fI" + Escaped(option->get_name(true)) + "\\fR" + dots;
      page += option->get_required() ? name + "\n" : "[" + name + "]\n";
    }
  }
  if (const auto commands = Visible(command); !commands.empty()) {
    page += ".SH COMMANDS\n";
    for (const CLI::App* subcommand : commands) {
      page += fmt::format(".TP\n\\fB{}\\fR(1)\n{}.\n", Escaped(PageName(*subcommand)),
                          Escaped(subcommand->get_description()));
    }
  }
  std::string options;
  for (const std::string& group : command.get_groups()) {
    std::string items;
    for (const CLI::Option* option : command.get_options()) {
      if (option->get_group() == group && !group.empty()) items += Item(*option);
    }
    if (!items.empty()) options += fmt::format(".SS {}\n{}", Escaped(group), items);
  }
  if (!options.empty()) page += ".SH OPTIONS\n" + options;
  if (const std::string footer = command.get_footer(); !footer.empty()) {
    page += ".SH NOTES\n.nf\n" + Escaped(footer) + "\n.fi\n";
  }
  page += ".SH SEE ALSO\n";
  if (command.get_parent() == nullptr) {
    page += "docs/client.md of denoised\n";
  } else {
    page += fmt::format("\\fB{}\\fR(1), whose options go with every command\n",
                        Escaped(PageName(*command.get_parent())));
  }
  return page;
}

absl::Status WriteManPages(const CLI::App& program, const std::string& version,
                           const std::string& folder) {
  const std::string path = folder + "/" + PageName(program) + ".1";
  if (absl::Status status = CheckWritable(path); !status.ok()) return status;
  if (absl::Status status = WriteFile(path, ManPage(program, version)); !status.ok()) {
    return status;
  }
  for (const CLI::App* command : Visible(program)) {
    absl::Status status = WriteManPages(*command, version, folder);
    if (!status.ok()) return status;
  }
  return absl::OkStatus();
}

}  // namespace denoised::command
