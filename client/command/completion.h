// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <CLI/CLI.hpp>
#include <functional>
#include <string>
#include <vector>

/// Completion in shells. The shell's script asks `denoise complete-words WORD…`, which answers from
/// the definition of the command line, so the script never gets stale.

namespace denoised::command {

/// Names of arguments in the help that say how they are completed.
inline constexpr char kFile[] = "FILE";
inline constexpr char kFolder[] = "FOLDER";
inline constexpr char kModel[] = "MODEL";
inline constexpr char kContext[] = "CONTEXT";

/// A word that may stand where the cursor is.
struct Candidate {
  std::string word;
  std::string description;  // one sentence, may be empty
};

/// What may stand where the cursor is.
struct Completion {
  std::vector<Candidate> candidates;
  std::string files;  // kFile or kFolder: the shell completes a path
};

/// The values of an argument that only a server or a file knows: kModel or kContext. `connection`
/// are the words before the cursor that belong to the whole program: "--server", "10.0.0.1:50051".
using ValuesOf = std::function<std::vector<std::string>(
    const std::string& argument, const std::vector<std::string>& connection)>;

/// Completes the last of `words`, which follow the program's name.
Completion Complete(const CLI::App& app, const std::vector<std::string>& words,
                    const ValuesOf& values);

/// As the scripts read it: a line for each candidate, "word<tab>description"; the last line is
/// ":files" or ":folders" where the shell is to complete a path.
std::string ToText(const Completion& completion);

/// The script for "bash", "zsh" or "fish".
std::string CompletionScript(const std::string& shell);

}  // namespace denoised::command
