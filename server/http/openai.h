// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <grpcpp/support/status.h>

#include <chrono>
#include <functional>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <vector>

#include "denoised/v1/image_generation.pb.h"
#include "server/jobs/memory_budget.h"
#include "server/models/catalog.h"
#include "server/security/clients.h"

/// OpenAI's images API as another form of our messages: docs/http.md.

namespace denoised {

/// How the reply is written.
struct OpenAiReplyOptions {
  bool edit = false;
  bool stream = false;
  bool urls = false;  // in place of base64
  int partial_images = 0;
  std::string output_format = "png", quality = "auto";  // as they are said in replies
};

/// A field of OpenAI's that changes nothing here, and its values.
struct OpenAiHint {
  const char* name;
  std::vector<const char*> values;  // none: any text
  bool generations = true, edits = true;
};
const std::vector<OpenAiHint>& OpenAiHints();

struct OpenAiRequest {
  v1::StreamGenerateRequest message;
  OpenAiReplyOptions reply;
  MemoryBudget::Lease upload;  // of the pictures in `message`
};

/// Reads a body of `caller`: a multipart form if `content_type` says so, else JSON.
grpc::Status ReadOpenAi(std::string_view content_type, std::string body, bool edit,
                        const Catalog& catalog, const Caller& caller, OpenAiRequest* request);

/// What OpenAI's API calls a field of denoised.v1: "params.count" is "n".
std::string OpenAiField(const std::string& field);

/// Makes a link to an image; empty when there is none to be had.
using MakeLink = std::function<std::string(const std::string& mime_type, std::string bytes)>;

/// The reply with all images.
std::string OpenAiReply(const OpenAiReplyOptions& options, v1::GenerateResponse* images,
                        const MakeLink& link);

/// The events of one stream. Not synchronised.
class OpenAiEvents {
 public:
  explicit OpenAiEvents(const OpenAiReplyOptions& options) : options_(options) {}

  /// With the empty line after it; empty for events that OpenAI's API has not.
  std::string Format(const v1::StreamGenerateResponse& event);

 private:
  /// `type`: "partial_image" or "completed"; `more`: fields of its own.
  std::string Event(const std::string& type, const v1::Image& image, const std::string& more,
                    const std::string& own);

  const OpenAiReplyOptions options_;
  std::string request_id_;
  std::string size_;
  std::map<int, int> partial_images_;  // that were sent, by image
};

}  // namespace denoised
