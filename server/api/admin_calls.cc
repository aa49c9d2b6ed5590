// SPDX-License-Identifier: Apache-2.0
#include "server/api/admin_calls.h"

#include <fmt/format.h>

#include <chrono>
#include <memory>
#include <optional>
#include <utility>

#include "absl/strings/strip.h"
#include "server/api/call_record.h"
#include "server/models/catalog.h"
#include "server/security/clients.h"
#include "server/status/status_details.h"
#include "server/telemetry/log.h"

namespace denoised {
namespace {

/// Only admins may change the models.
grpc::Status Authorize(const Caller& caller) {
  if (caller.admin) return grpc::Status::OK;
  const std::string problem =
      caller.anonymous()
          ? "callers without a name may not change models here; ask the server's operator for the "
            "token of a client with \"admin\": true"
          : fmt::format(
                "client \"{}\" may not change models; give it \"admin\": true in the file "
                "of clients",
                caller.name);
  return ToGrpcStatus(absl::PermissionDeniedError(problem), reason::kNotAdmin, "");
}

/// Who changed what, or wanted to.
void LogChange(const ModelChange& change, const CallRecord& call, const grpc::Status& status) {
  log::Fields fields = {{"change", change.verb},
                        {"client", call.caller().name},
                        {"peer", call.peer()},
                        {"trace_id", call.trace().trace_id},
                        {"code", CodeName(status.error_code())}};
  for (const auto& [name, value] : {std::pair{"model", &change.model},
                                    {"directory", &change.directory},
                                    {"alias", &change.alias}}) {
    // What the client sent may be of any length.
    if (!value->empty()) fields.push_back({name, value->substr(0, 256)});
  }
  if (!status.ok()) fields.push_back({"error", status.error_message()});
  if (ReasonOf(status) == reason::kChangeIncomplete) {
    return log::Warning("models changed, but not all of the change was done", fields);
  }
  log::Info(status.ok() ? "models changed" : "models not changed", fields);
}

}  // namespace

grpc::Status ToGrpc(const absl::Status& status) {
  const char* reason = reason::kModelFailed;
  if (absl::IsAlreadyExists(status)) reason = reason::kModelExists;
  if (absl::IsNotFound(status)) reason = reason::kModelNotFound;
  if (absl::IsResourceExhausted(status)) reason = reason::kDeviceMemory;
  if (absl::IsInternal(status)) reason = reason::kServerError;
  std::optional<std::chrono::milliseconds> retry_delay;
  if (IsBusy(status)) {
    reason = reason::kModelLoading;
    retry_delay = std::chrono::seconds(2);
  }
  if (TookEffect(status)) reason = reason::kChangeIncomplete;
  if (absl::IsNotFound(status) && !TookEffect(status)) {
    // The catalog's message begins with the field that names what is not there.
    for (const char* field : {"name", "model_name", "alias", "target"}) {
      absl::string_view description = status.message();
      if (!absl::ConsumePrefix(&description, fmt::format("{}: ", field))) continue;
      return FieldStatus(status.code(), {field, std::string(description)}, reason, "");
    }
  }
  return ToGrpcStatus(status, reason, "", retry_delay);
}

grpc::Status NoAdmins() {
  return ToGrpcStatus(
      absl::UnimplementedError("nobody may load and unload models of this server; see --admin"),
      reason::kNoAdmins, "");
}

void AdminCalls::Post(std::shared_ptr<CallRecord> record, ModelChange change,
                      std::function<grpc::Status()> work,
                      std::function<void(const grpc::Status&)> end) {
  WorkerPool& threads = change.waits ? waiting_ : quick_;
  const auto call =
      std::make_shared<Call>(Call{std::move(record), std::move(change), std::move(end)});
  {
    MutexLock lock(&mutex_);
    running_.insert(call);
  }
  // A refusal waits for no thread: loads may keep them all busy.
  grpc::Status refusal = Authorize(call->record->caller());
  if (refusal.ok()) refusal = CheckServing();
  if (!refusal.ok()) return End(call, refusal);
  const CallRecord& asker = *call->record;
  threads.Post(Priority::kNormal, ClientKey(asker.caller(), asker.peer()),
               [this, call, work = std::move(work)] {
                 const grpc::Status status = CheckServing();  // the drain may have begun meanwhile
                 End(call, status.ok() ? work() : status);
               });
}

grpc::ServerUnaryReactor* AdminCalls::Post(grpc::CallbackServerContext* context, const char* method,
                                           ModelChange change, std::function<grpc::Status()> work,
                                           std::function<grpc::Status()> reply) {
  auto* const reactor = new WatchedReactor(write_watch_, context);
  Post(std::make_shared<CallRecord>(calls_, method, context), std::move(change), std::move(work),
       [reactor, reply = std::move(reply)](const grpc::Status& status) {
         reactor->Send(status.ok() ? reply() : status);
       });
  return reactor;
}

void AdminCalls::End(const std::shared_ptr<Call>& call, const grpc::Status& status) {
  {
    MutexLock lock(&mutex_);
    if (running_.erase(call) == 0) return;
  }
  LogChange(call->change, *call->record, status);
  call->record->End(status.error_code(), status.error_message());
  // What it holds of the call must not stay until the change is done.
  std::exchange(call->end, nullptr)(status);
}

void AdminCalls::EndCalls() {
  std::set<std::shared_ptr<Call>> running;
  {
    MutexLock lock(&mutex_);
    running = running_;
  }
  for (const auto& call : running) {
    End(call, ToGrpcStatus(Unavailable("the server shut down before the change was done"),
                           reason::kDraining, ""));
  }
}

grpc::Status AdminCalls::CheckServing() const {
  if (!drain_->draining()) return grpc::Status::OK;
  return ToGrpcStatus(Unavailable("the server is shutting down"), reason::kDraining, "");
}

}  // namespace denoised
