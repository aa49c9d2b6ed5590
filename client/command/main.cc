#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <cstdio>
#include <memory>
#include <string>
#include <vector>

#include "command/bench.h"
#include "command/connection_flags.h"
#include "command/generate.h"
#include "command/health.h"
#include "command/interrupt.h"
#include "command/jobs.h"
#include "command/models.h"
#include "command/server_info.h"

using namespace denoised;  // NOLINT: the program itself

namespace {

constexpr char kFooter[] = R"(Examples:
  denoise models                            what the server can draw
  denoise generate --grid 4x4 --previews    sixteen pictures, watched as they come
  denoise health --wait 60                  return when the server is ready
  id=$(denoise generate -n 64 --detach)     begin, and let it go on by itself
  denoise jobs watch $id -o "{index}.png"   fetch what it drew
  denoise generate --help                   every knob
  denoise bench -c 16                       how many pictures a second the server can draw
  denoise --server dns:///replicas:50051 generate
                                            by one of the replicas; if it is lost, by another

Exit codes: 0 done; 1 error; 2 the command line or a value in it is wrong; 3 the server cannot be
reached, is not ready or is full; 4 --timeout passed; 130 interrupted.)";

}  // namespace

int main(int argc, char** argv) {
  CLI::App app("Draws pictures with the diffusion models of a denoised server.", "denoise");
  app.set_version_flag("--version", DENOISED_VERSION);
  app.footer(kFooter);
  app.require_subcommand(1);
  app.fallthrough();  // --server may follow the subcommand
  command::ConnectionFlags connection_flags;
  command::AddConnectionFlags(app, connection_flags);

  command::GenerateFlags generate_flags;
  CLI::App* generate = app.add_subcommand("generate", "Draw pictures");
  command::AddGenerateFlags(*generate, generate_flags);

  command::ModelsFlags models_flags;
  CLI::App* models = app.add_subcommand("models", "List the models, or tell all about one");
  models->add_option("name", models_flags.name, "A model");
  models->add_flag("--json", models_flags.json, "As JSON");
  command::ModelChangeFlags change;
  CLI::App* load = models->add_subcommand("load", "Load a model or a version of one (admins)");
  load->add_option("name", change.load.name, "Its name")->required();
  load->add_option("directory", change.load.directory,
                   "Directory on the server; default: the model's own, to load it again");
  load->add_option("--version", change.load.version, "Default: the number after the highest");
  load->add_flag("--keep-current", change.load.keep_current,
                 "Ask for the new version as name@version; requests without one get the old");
  load->add_flag("--unload-previous", change.load.unload_previous,
                 "Unload the version that was current once its requests are done");
  CLI::App* unload = models->add_subcommand("unload", "Unload a model or a version (admins)");
  unload->add_option("name", change.unload, "name or name@version")->required();
  CLI::App* alias = models->add_subcommand("alias", "Give a model another name (admins)");
  alias->add_option("alias", change.alias, "The other name; a model's own to choose its version")
      ->required();
  CLI::Option* target = alias->add_option("target", change.target, "name or name@version");
  alias->add_flag("--delete", change.delete_alias, "Remove the alias")->excludes(target);

  command::JobsFlags jobs_flags;
  CLI::App* jobs =
      app.add_subcommand("jobs", "Requests that run without a connection, by their id");
  jobs->require_subcommand(1);
  CLI::App* list_jobs = jobs->add_subcommand("list", "Those that run and those that are kept");
  list_jobs->add_flag("--all", jobs_flags.query.all_clients, "Those of all clients (admins)");
  list_jobs->add_option("--limit", jobs_flags.query.limit, "At most so many, the latest")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  CLI::App* get_job = jobs->add_subcommand("get", "How far a job is");
  CLI::App* watch_job = jobs->add_subcommand("watch", "Follow a job and save its pictures");
  CLI::App* cancel_job = jobs->add_subcommand("cancel", "End a job");
  for (CLI::App* job : {get_job, watch_job, cancel_job}) {
    job->add_option("id", jobs_flags.request_id, "The id that generate --detach printed")
        ->required();
  }
  for (CLI::App* job : {list_jobs, get_job, watch_job, cancel_job}) {
    job->add_flag("--json", jobs_flags.json, "As JSON");
  }
  watch_job->add_option("--after", jobs_flags.after_sequence, "Events up to this number are known");
  watch_job->add_option("-o,--out", jobs_flags.out, "File; as for generate");

  CLI::App* server = app.add_subcommand("server", "About the server");
  server->require_subcommand(1);
  bool info_json = false;
  CLI::App* server_info = server->add_subcommand("info", "What it is, can do and allows");
  server_info->add_flag("--json", info_json, "As JSON");

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
  client::ConnectionOptions options = command::ToOptions(connection_flags);
  // health tells of every answer, and to bench an error is a result.
  if (health->parsed() || bench->parsed()) options.retry.max_attempts = 1;
  std::vector<client::Client> clients;
  for (int i = 0; i < bench_flags.connections; ++i) {
    auto connection = client::Connect(connection_flags.server, options);
    if (!connection.ok()) return command::Report(connection.status(), generate_flags.json);
    clients.emplace_back(*std::move(connection));
  }
  const client::Client& client = clients.front();
  const client::CallOptions call = command::ToCallOptions(connection_flags, interrupt.token());
  if (generate->parsed()) return command::Generate(client, generate_flags, call);
  if (load->parsed()) return command::LoadModel(client, change, call);
  if (unload->parsed()) return command::UnloadModel(client, change, call);
  if (alias->parsed()) return command::SetAlias(client, change, call);
  if (list_jobs->parsed()) return command::ListJobs(client, jobs_flags, call);
  if (get_job->parsed()) return command::GetJob(client, jobs_flags, call);
  if (watch_job->parsed()) return command::WatchJob(client, jobs_flags, call);
  if (cancel_job->parsed()) return command::CancelJob(client, jobs_flags, call);
  if (server_info->parsed()) return command::ServerInfo(client, info_json, call);
  if (models->parsed()) return command::Models(client, models_flags, call);
  if (bench->parsed()) return command::Bench(clients, bench_flags, call);
  return command::Health(client, health_flags, call);
}
