// SPDX-License-Identifier: Apache-2.0
#include "command/completion.h"

#include <algorithm>
#include <sstream>

#include "flags/printable.h"

namespace denoised::command {
namespace {

constexpr char kBash[] = R"(# bash completion for denoise; made by: denoise completion bash
_denoise() {
  local rest=$COMP_LINE word line tab=$'\t'
  local -a words
  # bash splits words at =, : and @ too, where there is no space.
  for word in "${COMP_WORDS[@]:0:COMP_CWORD+1}"; do
    if [[ ${#words[@]} -eq 0 || $rest == [[:space:]]* ]]; then words+=("$word"); else words[-1]+=$word; fi
    rest=${rest#"${rest%%[![:space:]]*}"}
    rest=${rest#"$word"}
  done
  # It replaces what follows the last of these, and so wants no more.
  local current=${COMP_WORDS[COMP_CWORD]}
  [[ $current == *[!=:@]* ]] || current=
  local before=${words[-1]%"$current"}
  COMPREPLY=()
  while IFS= read -r line; do
    case $line in
      :files) compopt -o filenames; mapfile -t COMPREPLY < <(compgen -f -- "$current") ;;
      :folders) compopt -o filenames; mapfile -t COMPREPLY < <(compgen -d -- "$current") ;;
      # bash inserts words as they are, and a server chooses the names of its models.
      *)
        line=${line%%"$tab"*}
        word=${line#"$before"}
        [[ -z $word ]] || printf -v word %q "$word"
        COMPREPLY+=("$word") ;;
    esac
  done < <("${words[0]}" complete-words "${words[@]:1}" 2>/dev/null)
}
complete -F _denoise denoise
)";

constexpr char kZsh[] = R"(#compdef denoise
# zsh completion for denoise; made by: denoise completion zsh
_denoise() {
  local line tab=$'\t'
  local -a candidates
  while IFS= read -r line; do
    case $line in
      :files) _files; return ;;
      :folders) _files -/; return ;;
      *) candidates+=("${${line%%$tab*}//:/\\:}:${line#*$tab}") ;;
    esac
  done < <("$words[1]" complete-words "${(@)words[2,CURRENT]}" 2>/dev/null)
  _describe -V denoise candidates
}
if [[ $funcstack[1] == _denoise ]]; then
  _denoise "$@"
else
  compdef _denoise denoise
fi
)";

constexpr char kFish[] = R"(# fish completion for denoise; made by: denoise completion fish
function __denoise_complete
    set -l words (commandline -opc)
    set -l current (commandline -ct)
    set -l program $words[1]
    set -e words[1]
    set -l lines ($program complete-words $words "$current" 2>/dev/null)
    switch "$lines[-1]"
        case :files
            __fish_complete_path "$current"
        case :folders
            __fish_complete_directories "$current"
        case '*'
            printf '%s\n' $lines
    end
end
complete -c denoise -f -a '(__denoise_complete)'
)";

std::string FirstSentence(const std::string& text) {
  const size_t end = text.find(". ");
  std::string sentence = text.substr(0, end);
  if (!sentence.empty() && sentence.back() == '.') sentence.pop_back();
  std::replace(sentence.begin(), sentence.end(), '\n', ' ');
  return sentence;
}

/// "png", "jpeg" of "TEXT:{png,jpeg}".
std::vector<std::string> Members(const std::string& type) {
  const size_t begin = type.find('{'), end = type.find('}', begin);
  std::vector<std::string> members;
  if (end == std::string::npos) return members;
  std::istringstream list(type.substr(begin + 1, end - begin - 1));
  for (std::string member; std::getline(list, member, ',');) members.push_back(member);
  return members;
}

bool IsVisible(const CLI::Option& option) { return !option.get_group().empty(); }

/// The option that `word` names, in this command or in those above it.
const CLI::Option* Find(const CLI::App* app, const std::string& word) {
  for (; app != nullptr; app = app->get_parent()) {
    if (const CLI::Option* option = app->get_option_no_throw(word)) return option;
  }
  return nullptr;
}

class Completer {
 public:
  Completer(const CLI::App& app, const ValuesOf& values) : app_(&app), values_(values) {}

  /// A whole word before the cursor.
  void Read(const std::string& word) {
    if (pending_ != nullptr) {
      if (pending_of_program_) connection_.push_back(word);
      pending_ = nullptr;
    } else if (!only_positionals_ && word == "--") {
      only_positionals_ = true;
    } else if (!only_positionals_ && word.size() > 1 && word[0] == '-') {
      ReadOption(word);
    } else if (const CLI::App* command = Subcommand(word)) {
      app_ = command;
      positionals_ = 0;
    } else {
      ++positionals_;
    }
  }

  /// The word at the cursor.
  Completion Finish(const std::string& word) {
    begin_ = word;
    if (pending_ != nullptr) {
      AddValues(*pending_, "");
    } else if (const size_t equals = word.find('=');
               !only_positionals_ && word.starts_with("--") && equals != std::string::npos) {
      const std::string name = word.substr(0, equals);
      if (const CLI::Option* option = Find(app_, name)) AddValues(*option, name + "=");
    } else if (!only_positionals_ && word.starts_with("-")) {
      AddOptions();
    } else {
      AddSubcommandsAndPositionals();
    }
    return completion_;
  }

 private:
  const CLI::App* Subcommand(const std::string& word) const {
    if (only_positionals_) return nullptr;
    for (const CLI::App* command : Subcommands()) {
      if (command->get_name() == word) return command;
    }
    return nullptr;
  }

  std::vector<const CLI::App*> Subcommands() const {
    return app_->get_subcommands([](const CLI::App* app) { return !app->get_group().empty(); });
  }

  void ReadOption(const std::string& word) {
    const size_t equals = word.find('=');
    const CLI::Option* option = Find(app_, word.substr(0, equals));
    if (option == nullptr) return;
    const CLI::App* program = app_;
    while (program->get_parent() != nullptr) program = program->get_parent();
    const bool of_program = program->get_option_no_throw(word.substr(0, equals)) == option &&
                            option->get_items_expected_max() > 0;
    if (of_program) connection_.push_back(word);
    if (equals == std::string::npos && option->get_items_expected_max() > 0) {
      pending_ = option;
      pending_of_program_ = of_program;
    }
  }

  void Add(const std::string& word, const std::string& description) {
    if (word.starts_with(begin_)) completion_.candidates.push_back({word, description});
  }

  void AddValues(const CLI::Option& option, const std::string& prefix) {
    const std::string type = option.get_type_name();
    if (type.ends_with(kFile)) {  // also "TEXT:FILE", of CLI::ExistingFile
      completion_.files = kFile;
    } else if (type == kFolder) {
      completion_.files = kFolder;
    } else if (type == kModel || type == kContext) {
      for (const std::string& value : values_(type, connection_)) Add(prefix + value, "");
    } else {
      for (const std::string& value : Members(type)) Add(prefix + value, "");
    }
  }

  void AddOptions() {
    for (const CLI::App* app = app_; app != nullptr; app = app->get_parent()) {
      for (const CLI::Option* option : app->get_options()) {
        if (!IsVisible(*option) || (app != app_ && option == app->get_help_ptr())) continue;
        for (const std::string& name : option->get_lnames()) {
          Add("--" + name, FirstSentence(option->get_description()));
        }
      }
    }
  }

  void AddSubcommandsAndPositionals() {
    if (positionals_ == 0 && !only_positionals_) {
      for (const CLI::App* command : Subcommands()) {
        Add(command->get_name(), FirstSentence(command->get_description()));
      }
    }
    int index = 0;
    for (const CLI::Option* option : app_->get_options()) {
      if (!option->get_positional()) continue;
      // The last one takes all that follow, if it takes several.
      if (index++ == positionals_ ||
          (option->get_items_expected_max() > 1 && index <= positionals_)) {
        AddValues(*option, "");
      }
    }
  }

  const CLI::App* app_;
  const ValuesOf& values_;
  const CLI::Option* pending_ = nullptr;  // waits for its value
  bool pending_of_program_ = false;
  bool only_positionals_ = false;
  int positionals_ = 0;  // of the command, so far
  std::vector<std::string> connection_;
  std::string begin_;
  Completion completion_;
};

}  // namespace

Completion Complete(const CLI::App& app, const std::vector<std::string>& words,
                    const ValuesOf& values) {
  Completer completer(app, values);
  for (size_t i = 0; i + 1 < words.size(); ++i) completer.Read(words[i]);
  return completer.Finish(words.empty() ? std::string() : words.back());
}

std::string ToText(const Completion& completion) {
  std::string text;
  for (const Candidate& candidate : completion.candidates) {
    // An escaped word would name nothing.
    if (Printable(candidate.word) != candidate.word) continue;
    text += candidate.word + "\t" + Printable(candidate.description) + "\n";
  }
  if (completion.files == kFile) text += ":files\n";
  if (completion.files == kFolder) text += ":folders\n";
  return text;
}

std::string CompletionScript(const std::string& shell) {
  if (shell == "bash") return kBash;
  return shell == "zsh" ? kZsh : kFish;
}

}  // namespace denoised::command
