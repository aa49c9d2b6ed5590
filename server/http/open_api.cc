// SPDX-License-Identifier: Apache-2.0
#include "server/http/open_api.h"

#include <absl/strings/ascii.h>
#include <google/protobuf/descriptor.h>

#include <nlohmann/json.hpp>
#include <set>
#include <string_view>

#include "server/http/http_api.h"
#include "server/http/openai.h"
#include "server/version.h"

namespace denoised {
namespace {

using google::protobuf::Descriptor;
using google::protobuf::DescriptorPool;
using google::protobuf::EnumDescriptor;
using google::protobuf::FieldDescriptor;
using nlohmann::json;

/// "StreamGenerateResponse" of denoised.v1.StreamGenerateResponse.
std::string NameOf(const std::string& full_name) {
  return full_name.substr(full_name.rfind('.') + 1);
}
json Reference(const std::string& name) { return {{"$ref", "#/components/schemas/" + name}}; }

/// Describes messages as protobuf prints and reads them in JSON.
class Schemas {
 public:
  json Of(const std::string& full_name) {
    const Descriptor* message = DescriptorPool::generated_pool()->FindMessageTypeByName(full_name);
    // What is no message of the proto is described below.
    return message == nullptr ? Reference(full_name) : Of(message);
  }

  json Take() { return std::move(schemas_); }
  void Add(const char* name, json schema) { schemas_[name] = std::move(schema); }

 private:
  json Of(const Descriptor* message) {
    if (message->full_name() == "google.protobuf.Timestamp") {
      return {{"type", "string"}, {"format", "date-time"}};
    }
    if (message->full_name() == "google.protobuf.Any") {
      return {{"type", "object"}, {"properties", {{"@type", {{"type", "string"}}}}}};
    }
    const std::string name = NameOf(message->full_name());
    if (schemas_.contains(name)) return Reference(name);
    schemas_[name] = json::object();  // a message may hold itself
    json properties = json::object(), required = json::array();
    for (int i = 0; i < message->field_count(); ++i) {
      const FieldDescriptor& field = *message->field(i);
      const json one = Of(field);
      properties[field.name()] =
          field.is_repeated() ? json{{"type", "array"}, {"items", one}} : one;
      const bool always =
          field.is_repeated() || (!field.has_presence() && field.containing_oneof() == nullptr);
      if (always) required.push_back(field.name());
    }
    schemas_[name] = {
        {"type", "object"}, {"properties", properties}, {"additionalProperties", false}};
    // Replies have all of these; requests may leave them out.
    if (!required.empty() && !name.ends_with("Request") && !MayBePartial(name)) {
      schemas_[name]["required"] = required;
    }
    return Reference(name);
  }

  /// Whether a message is part of requests, which may leave its fields out, and maybe of replies
  /// too.
  static bool MayBePartial(const std::string& name) {
    static const std::set<std::string> kNames = {
        "GenerationParams", "OutputOptions", "PreviewOptions", "InitImage", "Condition",
        "SizeConditions",   "ImageSize",     "ImagePoint",     "Tensor"};
    return kNames.count(name) > 0;
  }

  json Of(const FieldDescriptor& field) {
    switch (field.type()) {
      case FieldDescriptor::TYPE_MESSAGE:
        return Of(field.message_type());
      case FieldDescriptor::TYPE_ENUM: {
        const EnumDescriptor& values = *field.enum_type();
        const std::string name = NameOf(values.full_name());
        if (!schemas_.contains(name)) {
          json names = json::array();
          for (int i = 0; i < values.value_count(); ++i) names.push_back(values.value(i)->name());
          schemas_[name] = {{"type", "string"}, {"enum", names}};
        }
        return Reference(name);
      }
      case FieldDescriptor::TYPE_BOOL:
        return {{"type", "boolean"}};
      case FieldDescriptor::TYPE_STRING:
        return {{"type", "string"}};
      case FieldDescriptor::TYPE_BYTES:
        return {{"type", "string"}, {"contentEncoding", "base64"}};
      case FieldDescriptor::TYPE_INT32:
        return {{"type", "integer"}, {"format", "int32"}};
      case FieldDescriptor::TYPE_INT64:
        return {{"type", {"string", "integer"}}, {"format", "int64"}};
      case FieldDescriptor::TYPE_UINT64:
        return {{"type", {"string", "integer"}}, {"format", "uint64"}};
      default:
        // Infinity and NaN are strings.
        return {{"type", {"number", "string"}}};
    }
  }

  json schemas_ = json::object();
};

json Of(const char* type) { return {{"type", type}}; }

json Properties(std::initializer_list<std::pair<const char*, json>> properties) {
  json object = json::object();
  for (const auto& [name, schema] : properties) object[name] = schema;
  return object;
}

/// OpenAI's, which no proto describes.
void AddOpenAi(Schemas* schemas) {
  json fields = Properties({
      {"prompt", Of("string")},
      {"model", Of("string")},
      {"n", Of("integer")},
      {"size", Of("string")},
      {"background", {{"enum", {"auto", "opaque"}}}},
      {"output_format", {{"enum", {"png", "jpeg", "webp"}}}},
      {"output_compression", Of("integer")},
      {"response_format", {{"enum", {"b64_json", "url"}}}},
      {"stream", Of("boolean")},
      {"partial_images", Of("integer")},
      {"denoised", Reference("Extensions")},
  });
  json generation = fields, edit = fields;
  for (const OpenAiHint& hint : OpenAiHints()) {
    const json schema = hint.values.empty() ? Of("string") : json({{"enum", hint.values}});
    if (hint.generations) generation[hint.name] = schema;
    if (hint.edits) edit[hint.name] = schema;
  }
  const json data_url = {{"type", "object"}, {"properties", {{"image_url", Of("string")}}}};
  const json file = {{"type", "string"}, {"contentMediaType", "application/octet-stream"}};
  edit["images"] = {{"type", "array"}, {"items", data_url}};
  edit["mask"] = data_url;
  schemas->Add("ImageGeneration", {{"type", "object"}, {"properties", generation}});
  schemas->Add("ImageEdit", {{"type", "object"}, {"properties", edit}});
  edit.erase("images");
  edit["image"] = edit["mask"] = file;
  schemas->Add("ImageEditForm", {{"type", "object"}, {"properties", edit}});
  schemas->Add("Extensions",
               {{"description",
                 "Any field of GenerationParams, and these. Samplers may be short: \"ddim\"."},
                {"type", "object"},
                {"properties", Properties({{"negative_prompt", Of("string")},
                                           {"label", {{"type", {"integer", "string"}}}},
                                           {"labels", Of("array")},
                                           {"strength", Of("number")}})}});
  schemas->Add(
      "Images",
      {{"type", "object"},
       {"required", {"created", "data", "size", "background", "output_format", "denoised"}},
       {"properties",
        Properties(
            {{"created", Of("integer")},
             {"background", Of("string")},
             {"output_format", Of("string")},
             {"quality", Of("string")},
             {"size", Of("string")},
             {"data",
              {{"type", "array"},
               {"items",
                {{"type", "object"},
                 {"required", {"denoised"}},
                 {"properties",
                  Properties(
                      {{"b64_json", Of("string")},
                       {"url", Of("string")},
                       {"denoised",
                        {{"type", "object"},
                         {"properties", Properties({{"index", Of("integer")},
                                                    {"seed", Of("string")},
                                                    {"class_label", Of("integer")}})}}}})}}}}},
             {"denoised",
              {{"type", "object"},
               {"properties", Properties({{"request_id", Of("string")},
                                          {"params", schemas->Of("denoised.v1.GenerationParams")},
                                          {"run", schemas->Of("denoised.v1.Run")},
                                          {"timing", schemas->Of("denoised.v1.Timing")}})}}}})}});
}

/// The data of events of a stream, the last of which may be an error.
json Events(std::initializer_list<json> schemas) {
  json any = json::array();
  for (const json& schema : schemas) any.push_back(schema);
  any.push_back(Reference("Error"));
  return {{"anyOf", any}};
}

/// Events of OpenAI's, which have their images' fields, those of one kind, and ours.
json OpenAiEvent(const char* kind, const char* field, json schema, json own) {
  own.update(Properties({{"index", Of("integer")},
                         {"seed", Of("string")},
                         {"class_label", Of("integer")},
                         {"request_id", Of("string")}}));
  const std::string name = kind;
  return {{"type", "object"},
          {"required",
           {"type", "b64_json", "created_at", "size", "quality", "background", "output_format",
            field, "denoised"}},
          {"properties",
           Properties({{"type", {{"enum", {"image_generation." + name, "image_edit." + name}}}},
                       {"b64_json", {{"type", "string"}, {"contentEncoding", "base64"}}},
                       {"created_at", Of("integer")},
                       {"size", Of("string")},
                       {"quality", Of("string")},
                       {"background", Of("string")},
                       {"output_format", Of("string")},
                       {field, std::move(schema)},
                       {"denoised", {{"type", "object"}, {"properties", std::move(own)}}}})},
          {"additionalProperties", false}};
}

json ErrorSchema() {
  const json text_or_null = {{"type", {"string", "null"}}};
  return {{"type", "object"},
          {"required", {"error"}},
          {"properties",
           {{"error",
             {{"type", "object"},
              {"required", {"message", "type", "param", "code", "status", "details"}},
              {"properties",
               Properties({{"message", Of("string")},
                           {"type", Of("string")},
                           {"param", text_or_null},
                           {"code", text_or_null},
                           {"status", Of("string")},
                           {"details", {{"type", "array"}, {"items", Of("object")}}}})}}}}}};
}

/// Replies that OpenAI's clients read too have its members beside ours.
json OpenAiMembers(const std::string& response) {
  json members = json::object();
  if (response == "denoised.v1.ListModelsResponse") {
    members = Properties(
        {{"object", Of("string")}, {"data", {{"type", "array"}, {"items", Of("object")}}}});
  } else if (response == "denoised.v1.GetModelResponse") {
    members = Properties({{"id", Of("string")},
                          {"object", Of("string")},
                          {"created", Of("integer")},
                          {"owned_by", Of("string")}});
  } else if (response == "denoised.v1.UnloadModelResponse") {
    members =
        Properties({{"id", Of("string")}, {"object", Of("string")}, {"deleted", Of("boolean")}});
  }
  return members;
}

/// "request_id" of "/v1/jobs/{request_id}/cancel", and others.
json PathParameters(std::string_view path) {
  json parameters = json::array();
  while (true) {
    const size_t open = path.find('{');
    if (open == std::string_view::npos) return parameters;
    const size_t close = path.find('}');
    parameters.push_back({{"name", std::string(path.substr(open + 1, close - open - 1))},
                          {"in", "path"},
                          {"required", true},
                          {"schema", Of("string")}});
    path.remove_prefix(close + 1);
  }
}

json Parameter(const std::string& name, const char* in, const char* type = "string") {
  return {{"name", name}, {"in", in}, {"schema", Of(type)}};
}

json Content(const char* type, json schema) { return {{type, {{"schema", std::move(schema)}}}}; }

}  // namespace

std::string OpenApiJson() {
  Schemas schemas;
  json paths = json::object();
  json extended = json::object();
  for (const Route& route : Routes()) {
    json operation = {{"summary", route.summary}};
    json parameters = PathParameters(route.path);
    for (const std::string& name : route.query) {
      parameters.push_back(Parameter(name, "query"));
    }
    const bool events = std::string_view(route.path).ends_with("/events");
    if (events) parameters.push_back(Parameter("Last-Event-ID", "header"));
    if (events || route.body == Route::kJson || route.body == Route::kFormOrJson) {
      parameters.push_back(Parameter("Request-Timeout", "header", "number"));
    }
    if (!parameters.empty()) operation["parameters"] = parameters;
    if (route.access != Route::kOpen) {
      operation["security"] = json::array({json::object(), {{"token", json::array()}}});
    }
    if (route.request != nullptr) {
      json content = Content("application/json", schemas.Of(route.request));
      if (route.body == Route::kFormOrJson) {
        content["multipart/form-data"] = {{"schema", Reference("ImageEditForm")}};
      }
      operation["requestBody"] = {{"required", true}, {"content", content}};
    }
    json reply = {{"description", "OK"}};
    if (route.response != nullptr) {
      const std::string response = route.response;
      json schema = schemas.Of(response);
      const json members = OpenAiMembers(response);
      if (!members.empty()) extended[NameOf(response)] = members;
      reply["content"] = events ? Content("text/event-stream", Events({schema}))
                                : Content("application/json", schema);
      if (response == "denoised.v1.GenerateResponse") {
        reply["content"].update(Content(
            "text/event-stream", Events({schemas.Of("denoised.v1.StreamGenerateResponse")})));
      } else if (response == "Images") {
        reply["content"].update(
            Content("text/event-stream",
                    Events({Reference("PartialImageEvent"), Reference("CompletedImageEvent")})));
      }
    } else if (std::string_view(route.path) == "/v1/images/files/{file}") {
      reply["content"] = Content("image/*", Of("string"));
    } else if (std::string_view(route.path) == "/openapi.json") {
      reply["content"] = Content("application/json", Of("object"));
    } else {
      reply["content"] = Content("text/plain", Of("string"));
    }
    operation["responses"] = {{"200", reply},
                              {"default",
                               {{"description", "An error"},
                                {"content", Content("application/json", Reference("Error"))}}}};
    paths[route.path][absl::AsciiStrToLower(route.method)] = operation;
  }
  AddOpenAi(&schemas);
  json all = schemas.Take();
  for (const auto& [name, members] : extended.items()) {
    for (const auto& [member, schema] : members.items()) {
      all[name]["properties"][member] = schema;
      all[name]["required"].push_back(member);
    }
  }
  all["Error"] = ErrorSchema();
  all["PartialImageEvent"] =
      OpenAiEvent("partial_image", "partial_image_index", Of("integer"),
                  Properties({{"evaluation", Of("integer")}, {"evaluations", Of("integer")}}));
  all["CompletedImageEvent"] = OpenAiEvent("completed", "usage", Of("object"), json::object());
  const json document = {
      {"openapi", "3.1.0"},
      {"info",
       {{"title", "denoised"},
        {"version", kVersion},
        {"description", "Images drawn by diffusion models: docs/http.md of denoised."},
        {"license", {{"name", "Apache-2.0"}, {"identifier", "Apache-2.0"}}}}},
      {"paths", paths},
      {"components",
       {{"schemas", all},
        {"securitySchemes", {{"token", {{"type", "http"}, {"scheme", "bearer"}}}}}}}};
  return document.dump() + "\n";
}

}  // namespace denoised
