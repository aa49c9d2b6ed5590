// SPDX-License-Identifier: Apache-2.0
#include "tests/client/fake_service.h"

#include <fmt/format.h>
#include <grpcpp/health_check_service_interface.h>
#include <png.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <thread>

#include "denoised/rpc/error_details.pb.h"
#include "denoised/rpc/status.pb.h"

namespace denoised::client {
namespace {

constexpr char kLabels[][6] = {"zero", "one", "two",   "three", "four",
                               "five", "six", "seven", "eight", "nine"};
constexpr int kEvaluations = 4;

template <typename... Details>
grpc::Status WithDetails(grpc::StatusCode code, const std::string& message,
                         const Details&... details) {
  rpc::Status status;
  status.set_code(code);
  status.set_message(message);
  const auto add = [&status](const google::protobuf::Message& detail) {
    google::protobuf::Any* any = status.add_details();
    // Not PackFrom: the name on the wire is the published one, that of our copy is not.
    any->set_type_url("type.googleapis.com/google.rpc." + detail.GetDescriptor()->name());
    any->set_value(detail.SerializeAsString());
  };
  (add(details), ...);
  return grpc::Status(code, message, status.SerializeAsString());
}

rpc::ErrorInfo Info(const std::string& reason) {
  rpc::ErrorInfo info;
  info.set_reason(reason);
  info.set_domain("denoised");
  return info;
}

rpc::RetryInfo Retry(std::chrono::milliseconds after) {
  rpc::RetryInfo retry;
  retry.mutable_retry_delay()->set_seconds(after.count() / 1000);
  retry.mutable_retry_delay()->set_nanos(after.count() % 1000 * 1'000'000);
  return retry;
}

/// Every default filled in.
v1::GenerationParams Effective(const v1::GenerationParams& params) {
  v1::GenerationParams effective = params;
  if (params.model().empty()) effective.set_model("digits");
  if (params.request_id().empty()) effective.set_request_id("fake-1");
  if (!params.seeds().empty()) effective.set_seed(params.seeds(0));
  if (!params.has_count()) effective.set_count(1);
  const int given = params.conditions_size();
  for (int i = given; i < effective.count(); ++i) {
    v1::Condition& condition = *effective.add_conditions();
    if (given > 0) {
      condition = params.conditions(0);
    } else {
      condition.set_class_label(i % 10);
    }
  }
  if (!params.has_guidance_scale()) effective.set_guidance_scale(1);
  if (!params.has_steps()) effective.set_steps(kEvaluations);
  if (!params.sampler()) effective.set_sampler(v1::SAMPLER_EDM_EULER);
  if (!params.noise_schedule()) effective.set_noise_schedule(v1::NOISE_SCHEDULE_KARRAS);
  if (!params.has_width()) effective.set_width(16);
  if (!params.has_height()) effective.set_height(16);
  if (params.has_initial_noise()) effective.mutable_initial_noise()->clear_data();
  if (params.has_init_image()) effective.mutable_init_image()->clear_source();
  if (params.has_mask()) effective.mutable_mask()->clear_source();
  return effective;
}

v1::Run RunOf(const v1::GenerationParams& effective) {
  v1::Run run;
  run.set_model_version("1");
  run.set_steps(effective.steps());
  run.set_evaluations(kEvaluations);
  return run;
}

/// A horizontal gradient; its brightness says how far the image is and which class it shows.
std::string Gradient(int width, int height, int label, int evaluation) {
  std::string grey(static_cast<size_t>(width) * height, '\0');
  for (int i = 0; i < width * height; ++i) {
    const int x = i % width;
    grey[i] = static_cast<char>(std::min(255, 25 * label + x * 10 * evaluation / kEvaluations));
  }
  return grey;
}

std::string EncodePng(int width, int height, const std::string& grey) {
  png_image image = {};
  image.version = PNG_IMAGE_VERSION;
  image.width = width;
  image.height = height;
  image.format = PNG_FORMAT_GRAY;
  png_alloc_size_t size = PNG_IMAGE_PNG_SIZE_MAX(image);
  std::string file(size, '\0');
  png_image_write_to_memory(&image, file.data(), &size, 0, grey.data(), 0, nullptr);
  file.resize(size);
  return file;
}

v1::Image Draw(const v1::GenerationParams& params, int index, v1::ImageFormat format,
               int evaluation) {
  v1::Image image;
  image.set_index(index);
  image.set_seed(params.seeds().empty() ? params.seed() + index : params.seeds(index));
  const int label = params.conditions(index).class_label();
  image.set_class_label(label);
  image.set_width(params.width());
  image.set_height(params.height());
  const std::string grey = Gradient(params.width(), params.height(), label, evaluation);
  if (format == v1::IMAGE_FORMAT_RAW_UINT8 || format == v1::IMAGE_FORMAT_RAW_FLOAT32) {
    image.set_mime_type("application/octet-stream");
    v1::Tensor* tensor = image.mutable_tensor();
    for (const int extent : {params.height(), params.width(), 1}) tensor->add_shape(extent);
    if (format == v1::IMAGE_FORMAT_RAW_UINT8) {
      tensor->set_data_type(v1::DATA_TYPE_UINT8);
      tensor->set_data(grey);
    } else {
      tensor->set_data_type(v1::DATA_TYPE_FLOAT32);
      std::vector<float> values;
      for (const char pixel : grey) values.push_back(uint8_t(pixel) / 127.5f - 1);
      tensor->set_data(values.data(), values.size() * sizeof(float));
    }
  } else {
    image.set_mime_type("image/png");
    image.set_encoded(EncodePng(params.width(), params.height(), grey));
  }
  return image;
}

}  // namespace

grpc::Status InvalidFields(const std::vector<std::pair<std::string, std::string>>& violations) {
  rpc::BadRequest bad_request;
  for (const auto& [field, description] : violations) {
    auto* violation = bad_request.add_field_violations();
    violation->set_field(field);
    violation->set_description(description);
  }
  return WithDetails(grpc::StatusCode::INVALID_ARGUMENT, "the request has invalid fields",
                     bad_request, Info("INVALID_FIELDS"));
}

grpc::Status QueueFull(std::chrono::milliseconds retry_after) {
  return WithDetails(grpc::StatusCode::RESOURCE_EXHAUSTED, "the queue is full", Retry(retry_after),
                     Info("QUEUE_FULL"));
}

grpc::Status Loading(std::chrono::milliseconds retry_after) {
  return WithDetails(grpc::StatusCode::FAILED_PRECONDITION, "the model is still loading",
                     Retry(retry_after), Info("MODEL_LOADING"));
}

grpc::Status Draining() {
  return WithDetails(grpc::StatusCode::UNAVAILABLE, "the server is draining", Info("DRAINING"));
}

FakeServer::FakeServer(std::shared_ptr<grpc::ServerCredentials> credentials) {
  grpc::EnableDefaultHealthCheckService(true);
  grpc::ServerBuilder builder;
  builder.AddListeningPort("127.0.0.1:0", credentials, &port_);
  builder.SetMaxReceiveMessageSize(64 << 20);
  builder.RegisterService(this);
  server_ = builder.BuildAndStart();
  SetServing(true);
}

FakeServer::~FakeServer() {
  server_->Shutdown(std::chrono::system_clock::now() + std::chrono::seconds(1));
}

void FakeServer::Stop() { server_->Shutdown(std::chrono::system_clock::now()); }

std::string FakeServer::address() const { return fmt::format("127.0.0.1:{}", port_); }

void FakeServer::SetServing(bool serving) {
  auto* health = server_->GetHealthCheckService();
  for (const char* service : {"", v1::ImageGeneration::service_full_name()}) {
    health->SetServingStatus(service, serving);
  }
}

void FakeServer::FailNext(int count, const grpc::Status& status) {
  std::lock_guard lock(mutex_);
  failures_ = count;
  failure_ = status;
}

void FakeServer::BreakNext(int count, uint64_t events, const grpc::Status& status) {
  std::lock_guard lock(mutex_);
  breaks_ = count;
  break_after_ = events;
  break_ = status;
}

std::vector<v1::GenerationParams> FakeServer::requests() const {
  std::lock_guard lock(mutex_);
  return requests_;
}

v1::StreamGenerateRequest FakeServer::streamed() const {
  std::lock_guard lock(mutex_);
  return streamed_;
}

std::multimap<std::string, std::string> FakeServer::metadata() const {
  std::lock_guard lock(mutex_);
  return metadata_;
}

std::string FakeServer::authorization() const {
  const auto all = metadata();
  const auto found = all.find("authorization");
  return found == all.end() ? "" : found->second;
}

void FakeServer::KeepMetadata(const grpc::ServerContext& context) {
  std::lock_guard lock(mutex_);
  metadata_.clear();
  for (const auto& [key, value] : context.client_metadata()) {
    metadata_.emplace(std::string(key.data(), key.size()), std::string(value.data(), value.size()));
  }
}

grpc::Status FakeServer::Admit(const grpc::ServerContext& context,
                               const v1::GenerationParams& params) {
  KeepMetadata(context);
  ++generations_;
  std::lock_guard lock(mutex_);
  requests_.push_back(params);
  if (failures_ > 0) {
    --failures_;
    return failure_;
  }
  if (!params.model().empty() && params.model() != "digits") {
    return WithDetails(grpc::StatusCode::NOT_FOUND,
                       fmt::format("params.model: there is no model \"{}\"; this server holds: "
                                   "digits",
                                   params.model()),
                       Info("MODEL_NOT_FOUND"));
  }
  std::vector<std::pair<std::string, std::string>> violations;
  if (params.has_steps() && params.steps() < 1) {
    violations.push_back({"params.steps", fmt::format("is {}; use 1 to 100", params.steps())});
  }
  if (params.has_guidance_scale() && params.guidance_scale() < 0) {
    violations.push_back(
        {"params.guidance_scale", fmt::format("is {}; use 0 to 100", params.guidance_scale())});
  }
  return violations.empty() ? grpc::Status::OK : InvalidFields(violations);
}

grpc::Status FakeServer::Generate(grpc::ServerContext* context, const v1::GenerateRequest* request,
                                  v1::GenerateResponse* response) {
  if (grpc::Status status = Admit(*context, request->params()); !status.ok()) return status;
  const auto until = std::chrono::steady_clock::now() + kEvaluations * evaluation_time_.load();
  while (std::chrono::steady_clock::now() < until) {
    if (context->IsCancelled()) {
      ++cancelled_;
      return grpc::Status::CANCELLED;
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
  }
  *response->mutable_params() = Effective(request->params());
  *response->mutable_run() = RunOf(response->params());
  for (int i = 0; i < response->params().count(); ++i) {
    *response->add_images() =
        Draw(response->params(), i, request->params().output().format(), kEvaluations);
    if (image_bytes_ > 0) {
      response->mutable_images(i)->set_encoded(std::string(image_bytes_, 'x'));
    }
  }
  response->mutable_timing()->set_total_seconds(0.5);
  return grpc::Status::OK;
}

grpc::Status FakeServer::StreamGenerate(grpc::ServerContext* context,
                                        const v1::StreamGenerateRequest* request,
                                        grpc::ServerWriter<v1::StreamGenerateResponse>* writer) {
  const v1::GenerationParams& params = request->params();
  if (grpc::Status status = Admit(*context, params); !status.ok()) return status;
  const v1::GenerationParams effective = Effective(params);
  uint64_t sequence = 0, last = UINT64_MAX;
  std::vector<int> places;
  {
    std::lock_guard lock(mutex_);
    streamed_ = *request;
    places = places_;
    if (breaks_ > 0) {
      --breaks_;
      last = break_after_;
    }
  }
  // False when this event was the last.
  const auto write = [&](v1::StreamGenerateResponse response) {
    response.set_sequence(++sequence);
    response.set_request_id(effective.request_id());
    writer->Write(response);
    return sequence < last;
  };
  const auto broken = [this] {
    std::lock_guard lock(mutex_);
    return break_;
  };
  v1::StreamGenerateResponse queued;
  *queued.mutable_queued()->mutable_params() = effective;
  *queued.mutable_queued()->mutable_run() = RunOf(effective);
  for (const int place : places) {
    queued.mutable_queued()->set_images_ahead(place);
    queued.mutable_queued()->set_estimated_start_seconds(place * 60);
    if (!write(queued)) return broken();
  }
  v1::StreamGenerateResponse started;
  started.mutable_started()->set_queued_seconds(0.25);
  if (!write(started)) return broken();
  for (int evaluation = 1; evaluation <= kEvaluations; ++evaluation) {
    const auto until = std::chrono::steady_clock::now() + evaluation_time_.load();
    do {
      if (context->IsCancelled()) {
        ++cancelled_;
        return grpc::Status::CANCELLED;
      }
      std::this_thread::sleep_for(std::chrono::milliseconds(2));
    } while (std::chrono::steady_clock::now() < until);
    v1::StreamGenerateResponse progress;
    progress.mutable_progress()->set_evaluations_done(evaluation * effective.count());
    progress.mutable_progress()->set_evaluations_total(kEvaluations * effective.count());
    if (!write(progress)) return broken();
    const bool previews = request->has_preview() && evaluation <= last_preview_;
    for (int i = 0; previews && i < effective.count(); ++i) {
      v1::StreamGenerateResponse preview;
      preview.mutable_preview()->set_evaluation(evaluation);
      preview.mutable_preview()->set_evaluations(kEvaluations);
      *preview.mutable_preview()->mutable_image() =
          Draw(effective, i, request->preview().format(), evaluation);
      if (!write(preview)) return broken();
    }
  }
  for (int i = 0; i < effective.count(); ++i) {
    v1::StreamGenerateResponse image;
    *image.mutable_image()->mutable_image() =
        Draw(effective, i, params.output().format(), kEvaluations);
    if (!write(image)) return broken();
  }
  if (omit_completed_) return grpc::Status::OK;
  v1::StreamGenerateResponse completed;
  *completed.mutable_completed()->mutable_params() = effective;
  *completed.mutable_completed()->mutable_run() = RunOf(effective);
  if (!cut_off_.empty()) {
    completed.mutable_completed()->mutable_run()->add_texts()->set_cut_off(cut_off_);
  }
  completed.mutable_completed()->mutable_timing()->set_queued_seconds(0.25);
  completed.mutable_completed()->mutable_timing()->set_total_seconds(0.5);
  if (!write(completed)) return broken();
  return grpc::Status::OK;
}

grpc::Status FakeServer::WatchJob(grpc::ServerContext*, const v1::WatchJobRequest* request,
                                  grpc::ServerWriter<v1::StreamGenerateResponse>* writer) {
  {
    std::lock_guard lock(mutex_);
    watched_ = *request;
  }
  v1::StreamGenerateResponse event;
  event.set_sequence(request->after_sequence() + 1);
  event.set_request_id(request->request_id());
  event.mutable_completed()->mutable_params()->set_request_id(request->request_id());
  writer->Write(event);
  return grpc::Status::OK;
}

v1::WatchJobRequest FakeServer::watched() const {
  std::lock_guard lock(mutex_);
  return watched_;
}

grpc::Status FakeServer::ListJobs(grpc::ServerContext*, const v1::ListJobsRequest* request,
                                  v1::ListJobsResponse* response) {
  int before = request->page_token().empty() ? 250 : std::stoi(request->page_token());
  while (before > 0 && response->jobs_size() < std::min(request->page_size(), 100)) {
    v1::Job* job = response->add_jobs();
    job->set_request_id(std::to_string(--before));
    job->set_client(request->all_clients() ? "somebody" : "me");
    job->mutable_error()->set_message(text_);
  }
  if (before > 0) response->set_next_page_token(std::to_string(before));
  return grpc::Status::OK;
}

grpc::Status FakeServer::GetJob(grpc::ServerContext*, const v1::GetJobRequest* request,
                                v1::GetJobResponse* response) {
  response->mutable_job()->set_request_id(request->request_id());
  response->mutable_job()->mutable_params()->set_count(3);
  response->mutable_job()->mutable_params()->mutable_output()->set_format(v1::IMAGE_FORMAT_WEBP);
  response->mutable_job()->mutable_error()->set_message(text_);
  return grpc::Status::OK;
}

grpc::Status FakeServer::GetServerInfo(grpc::ServerContext*, const v1::GetServerInfoRequest*,
                                       v1::GetServerInfoResponse* response) {
  v1::Device* device = response->add_devices();
  device->set_name("cpu");
  device->set_description(text_);
  return grpc::Status::OK;
}

grpc::Status FakeServer::ListModels(grpc::ServerContext* context,
                                    const v1::ListModelsRequest* request,
                                    v1::ListModelsResponse* response) {
  KeepMetadata(*context);
  if (several_) {  // another model, and an older version
    response->add_models()->set_name("cats");
    response->mutable_models(0)->set_current(true);
    response->add_models()->set_name("digits");
    response->mutable_models(1)->mutable_capabilities()->set_class_label(true);
  }
  if (another_loads_) {
    v1::Model* another = response->add_models();
    another->set_name("cats");
    another->set_current(true);
    another->set_state(v1::MODEL_STATE_LOADING);
  }
  v1::Model* model = response->add_models();
  model->set_name("digits");
  model->set_current(true);
  if (loading_ > 0) {
    --loading_;
    model->set_state(v1::MODEL_STATE_LOADING);
    return grpc::Status::OK;
  }
  model->set_state(v1::MODEL_STATE_AVAILABLE);
  model->set_architecture("UNet2DModel");
  model->set_parameters(1'234'567);
  model->mutable_capabilities()->set_class_label(true);
  for (const char* label : kLabels) model->add_labels(label);
  if (!label_.empty()) model->add_labels(label_);
  v1::ModelDefaults* defaults = model->mutable_defaults();
  defaults->set_sampler(v1::SAMPLER_EDM_EULER);
  defaults->set_noise_schedule(v1::NOISE_SCHEDULE_KARRAS);
  defaults->set_steps(kEvaluations);
  defaults->set_guidance_scale(1);
  defaults->set_width(16);
  defaults->set_height(16);
  v1::ModelLimits* limits = model->mutable_limits();
  limits->set_max_steps(100);
  limits->set_max_count(64);
  limits->set_num_classes(10);
  limits->set_size_multiple(4);
  limits->set_max_edge(64);
  limits->set_channels(1);
  model->add_samplers(v1::SAMPLER_EDM_EULER);
  model->add_samplers(v1::SAMPLER_HEUN);
  model->add_noise_schedules(v1::NOISE_SCHEDULE_KARRAS);
  model->set_memory_bytes(64 << 20);
  model->set_device("cpu");
  return grpc::Status::OK;
}

grpc::Status FakeServer::GetModel(grpc::ServerContext* context, const v1::GetModelRequest* request,
                                  v1::GetModelResponse* response) {
  if (request->name().empty() && several_) {
    return InvalidFields(
        {{"name", "is not set, and the server holds several models; use one of: cats, digits"}});
  }
  v1::ListModelsResponse models;
  ListModels(context, nullptr, &models);
  const v1::Model& digits = *models.models().rbegin();
  if (!request->name().empty() && request->name() != digits.name()) {
    return WithDetails(
        grpc::StatusCode::NOT_FOUND,
        fmt::format("name: there is no model \"{}\"; this server holds: digits", request->name()),
        Info("MODEL_NOT_FOUND"));
  }
  *response->mutable_model() = digits;
  return grpc::Status::OK;
}

}  // namespace denoised::client
