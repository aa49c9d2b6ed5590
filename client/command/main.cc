#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <cstdio>
#include <memory>
#include <string>
#include <vector>

#include "command/bench.h"
#include "command/generate.h"
#include "command/health.h"
#include "command/interrupt.h"
#include "command/models.h"

using namespace denoised;  // NOLINT: the program itself

namespace {

constexpr char kFooter[] = R"(Examples:
  denoise models                            what the server can draw
  denoise generate --grid 4x4 --previews    sixteen pictures, watched as they come
  denoise health --wait 60                  return when the server is ready
  denoise generate --help                   every knob
  denoise bench -c 16                       how many pictures a second the server can draw

Exit codes: 0 done; 1 error; 2 the command line or a value in it is wrong; 3 the server cannot be
reached, is not ready or is full; 4 --timeout passed; 130 interrupted.)";

}  // namespace

int main(int argc, char** argv) {
  CLI::App app("Draws pictures with the diffusion models of a denoised server.", "denoise");
  app.set_version_flag("--version", DENOISED_VERSION);
  app.footer(kFooter);
  app.require_subcommand(1);
  app.fallthrough();  // --server may follow the subcommand
  std::string server = "127.0.0.1:50051";
  app.add_option("--server", server, "Address of the server, host:port")
      ->envname("DENOISE_SERVER")
      ->capture_default_str();

  command::GenerateFlags generate_flags;
  CLI::App* generate = app.add_subcommand("generate", "Draw pictures");
  command::AddGenerateFlags(*generate, generate_flags);

  command::ModelsFlags models_flags;
  CLI::App* models = app.add_subcommand("models", "List the models, or tell all about one");
  models->add_option("name", models_flags.name, "A model");
  models->add_flag("--json", models_flags.json, "As JSON");

  command::HealthFlags health_flags;
  CLI::App* health = app.add_subcommand(
      "health", "Ask whether the server is ready; the exit code is 0 when it is");
  health->add_option("--service", health_flags.service, "A service; default: the whole server");
  health->add_option("--wait", health_flags.wait_seconds, "Wait up to so many seconds until it is")
      ->check(CLI::Range(0.0, 1e6));
  health->add_flag("--json", health_flags.json, "As JSON");

  command::BenchFlags bench_flags;
  CLI::App* bench = app.add_subcommand("bench", "Load the server and measure how it bears it");
  command::AddBenchFlags(*bench, bench_flags);

  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    return app.exit(error) == 0 ? command::kOk : command::kUsage;
  }

  const command::Interrupt interrupt;
  client::ConnectionOptions options;
  // health tells of every answer, and to bench an error is a result.
  if (health->parsed() || bench->parsed()) options.retry.max_attempts = 1;
  std::vector<client::Client> clients;
  for (int i = 0; i < bench_flags.connections; ++i) {
    auto connection = client::Connect(server, options);
    if (!connection.ok()) return command::Report(connection.status(), generate_flags.json);
    clients.emplace_back(*std::move(connection));
  }
  const client::Client& client = clients.front();
  if (generate->parsed()) return command::Generate(client, generate_flags, interrupt.token());
  if (models->parsed()) return command::Models(client, models_flags, interrupt.token());
  if (bench->parsed()) return command::Bench(clients, bench_flags, interrupt.token());
  return command::Health(client, health_flags, interrupt.token());
}
