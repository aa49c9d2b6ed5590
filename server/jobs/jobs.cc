// SPDX-License-Identifier: Apache-2.0
#include "server/jobs/jobs.h"

#include <fmt/format.h>
#include <google/protobuf/field_mask.pb.h>
#include <google/protobuf/io/coded_stream.h>
#include <google/protobuf/io/zero_copy_stream_impl_lite.h>
#include <google/protobuf/util/field_mask_util.h>
#include <google/protobuf/util/message_differencer.h>
#include <openssl/sha.h>

#include <algorithm>
#include <functional>
#include <iterator>
#include <limits>
#include <utility>
#include <vector>

#include "absl/strings/escaping.h"
#include "server/security/job_id.h"
#include "server/status/quote.h"
#include "server/status/status_details.h"

namespace denoised {
namespace {

using google::protobuf::FieldDescriptor;
using google::protobuf::Message;
using google::protobuf::util::FieldMaskUtil;

// Memory of a kept job besides its events, so that many empty jobs are bounded too.
constexpr size_t kEntryBytes = 2048;

/// Stands for an upload in comparisons. With a weaker hash a client could craft an upload that
/// equals another one, and would get the images of that.
std::string Digest(const std::string& bytes) {
  if (bytes.empty()) return "";
  std::string digest(SHA256_DIGEST_LENGTH, '\0');
  SHA256(reinterpret_cast<const unsigned char*>(bytes.data()), bytes.size(),
         reinterpret_cast<unsigned char*>(digest.data()));
  return fmt::format("{} bytes, SHA-256 {}", bytes.size(), absl::BytesToHexString(digest));
}

/// Copies the fields of `from`, but replaces uploads (its bytes fields) by digests: an upload can
/// be as large as a request.
void CopyWithDigests(const Message& from, Message* to) {
  std::vector<const FieldDescriptor*> fields;
  from.GetReflection()->ListFields(from, &fields);
  google::protobuf::FieldMask others;
  for (const FieldDescriptor* field : fields) {
    const bool single = !field->is_repeated();
    if (single && field->type() == FieldDescriptor::TYPE_BYTES) {
      std::string unused;
      const std::string& bytes = from.GetReflection()->GetStringReference(from, field, &unused);
      to->GetReflection()->SetString(to, field, Digest(bytes));
    } else if (single && field->type() == FieldDescriptor::TYPE_MESSAGE) {
      CopyWithDigests(from.GetReflection()->GetMessage(from, field),
                      to->GetReflection()->MutableMessage(to, field));
    } else {
      others.add_paths(field->name());
    }
  }
  FieldMaskUtil::MergeMessageTo(from, others, {}, to);
}

/// The form of a request that is compared.
v1::StreamGenerateRequest Asked(const JobRequest& request) {
  v1::StreamGenerateRequest asked;
  CopyWithDigests(request.params, asked.mutable_params());
  if (request.preview != nullptr) *asked.mutable_preview() = *request.preview;
  return asked;
}

/// Gives effective parameters, which have no uploads, those of the request that was asked.
void CopyUploads(const v1::GenerationParams& asked, v1::GenerationParams* effective) {
  if (effective->has_init_image()) {
    const double strength = effective->init_image().strength();
    *effective->mutable_init_image() = asked.init_image();
    effective->mutable_init_image()->set_strength(strength);
  }
  if (effective->has_mask()) *effective->mutable_mask() = asked.mask();
  if (effective->has_initial_noise()) *effective->mutable_initial_noise() = asked.initial_noise();
}

/// Counts the differences and writes the first alone: two requests may differ in millions of seeds.
class FirstDifference : public google::protobuf::util::MessageDifferencer::StreamReporter {
 public:
  using StreamReporter::StreamReporter;
  using Path = std::vector<google::protobuf::util::MessageDifferencer::SpecificField>;

  void ReportAdded(const google::protobuf::Message& a, const google::protobuf::Message& b,
                   const Path& path) override {
    if (First()) StreamReporter::ReportAdded(a, b, path);
  }
  void ReportDeleted(const google::protobuf::Message& a, const google::protobuf::Message& b,
                     const Path& path) override {
    if (First()) StreamReporter::ReportDeleted(a, b, path);
  }
  void ReportModified(const google::protobuf::Message& a, const google::protobuf::Message& b,
                      const Path& path) override {
    if (!First()) return;
    const FieldDescriptor* const field = path.back().field;
    if (field == nullptr || field->type() != FieldDescriptor::TYPE_BYTES) {
      return StreamReporter::ReportModified(a, b, path);
    }
    PrintPath(path, /*left_side=*/true);  // digests say nothing to a reader
    Print(" differs\n");
  }

  size_t count() const { return count_; }

 private:
  bool First() { return ++count_ == 1; }
  size_t count_ = 0;
};

struct Difference {
  size_t count = 0;
  std::string first;  // "modified: params.steps: 4 -> 5", "params.mask.encoded differs"
};

Difference Compare(const v1::StreamGenerateRequest& a, const v1::StreamGenerateRequest& b) {
  google::protobuf::util::MessageDifferencer differencer;
  Difference difference;
  {
    google::protobuf::io::StringOutputStream stream(&difference.first);
    FirstDifference first(&stream);
    differencer.ReportDifferencesTo(&first);
    differencer.Compare(a, b);
    difference.count = first.count();
  }  // has written all
  difference.first.resize(std::min(difference.first.size(), difference.first.find('\n')));
  return difference;
}

/// How a request differs from that of a job, `there`, which the job answers with the parameters
/// `effective`; empty if it asks for the same.
std::string DifferenceFrom(const v1::StreamGenerateRequest& there,
                           const v1::GenerationParams& effective, v1::StreamGenerateRequest asked) {
  // Generate has no preview options, so it may join a job that StreamGenerate started.
  if (!asked.has_preview() && there.has_preview()) *asked.mutable_preview() = there.preview();
  const Difference difference = Compare(there, asked);
  if (difference.count == 0) return "";
  // The parameters that the job answers with ask for the same.
  v1::StreamGenerateRequest answered = there;
  *answered.mutable_params() = effective;
  CopyUploads(there.params(), answered.mutable_params());
  const Difference other = Compare(answered, asked);
  if (other.count == 0) return "";
  // Of the two forms, the request has what it was made of.
  return other.count < difference.count ? other.first : difference.first;
}

grpc::Status AlreadyExists(const JobRequest& request, const std::string& difference) {
  const std::string& id = request.params.request_id();
  return FieldStatus(absl::StatusCode::kAlreadyExists,
                     {request.FieldName("params.request_id"),
                      fmt::format("{} belongs to a request that asks for something else ({}); use "
                                  "another id for another request",
                                  Quote(id), difference.substr(0, 200))},
                     reason::kRequestIdTaken, id);
}

}  // namespace

bool IsRequestId(const std::string& id) {
  return !id.empty() && id.size() <= 128 &&
         std::all_of(id.begin(), id.end(), [](char c) { return c >= 0x20 && c < 0x7f; });
}

Jobs::Key Jobs::KeyOf(const Generation& generation) {
  return {generation.origin().caller.name, generation.origin().request_id};
}

std::shared_ptr<Generation> Jobs::Begin(const JobRequest& request,
                                        const std::shared_ptr<GenerationWatcher>& watcher,
                                        grpc::Status* refusal) {
  const v1::GenerationParams& params = request.params;
  const bool named = IsRequestId(params.request_id());
  const absl::StatusOr<std::string> id = named ? params.request_id() : MakeJobId();
  if (!id.ok()) {
    *refusal = ToGrpcStatus(id.status(), reason::kServerError, "");
    return nullptr;
  }
  const bool survives = params.disconnect_policy() == v1::DISCONNECT_POLICY_CONTINUE;
  Entry entry;
  entry.asked = std::make_shared<const v1::StreamGenerateRequest>(
      named ? Asked(request) : v1::StreamGenerateRequest());
  entry.asked_bytes = entry.asked->ByteSizeLong();
  entry.generation =
      std::make_shared<Generation>(context_, this,
                                   Generation::Origin{.caller = request.caller,
                                                      .peer = request.peer,
                                                      .traceparent = request.traceparent,
                                                      .request_id = *id,
                                                      .arrival = request.arrival,
                                                      .deadline = request.deadline,
                                                      .survives = survives,
                                                      .kept = named || survives});
  std::shared_ptr<Generation> generation = entry.generation;
  std::shared_ptr<Generation> same;  // has the id, and asks for the same
  while (true) {
    Entry there;
    {
      MutexLock lock(&mutex_);
      const auto [known, fresh] = entries_.try_emplace(KeyOf(*generation));
      if (fresh || known->second.generation == same) {
        if (!fresh) {
          if (same->Join(watcher)) return same;
          Forget(*same);
        }
        known->second = std::move(entry);
        known->second.number = ++last_number_;
        generation->Watch(watcher);
        break;
      }
      there = known->second;
    }
    // Without the lock, since a request may be large. Meanwhile the entry may become another's.
    if (const std::string difference =
            DifferenceFrom(*there.asked, there.generation->Params(), *entry.asked);
        !difference.empty()) {
      *refusal = AlreadyExists(request, difference);
      return nullptr;
    }
    same = std::move(there.generation);
  }
  generation->Start(request);
  return generation;
}

std::shared_ptr<Generation> Jobs::Find(const std::string& client, const std::string& request_id,
                                       grpc::Status* refusal) const {
  if (request_id.empty()) {
    *refusal = InvalidFields(
        {{"request_id", "is not set; use the request_id of the job, which its first event tells"}},
        "");
    return nullptr;
  }
  MutexLock lock(&mutex_);
  const auto entry = entries_.find({client, request_id});
  if (entry != entries_.end()) return entry->second.generation;
  *refusal = FieldStatus(
      absl::StatusCode::kNotFound,
      {"request_id",
       fmt::format("there is no job {} of yours; ask the server that took it, or draw it again: a "
                   "result is kept for {} s, within {} bytes of all clients, while the server runs",
                   Quote(request_id), std::chrono::duration<double>(retention_.time).count(),
                   retention_.max_bytes)},
      reason::kJobNotFound, IsRequestId(request_id) ? request_id : "");
  return nullptr;
}

v1::Job Jobs::Describe(const Generation& generation) const {
  v1::Job job = generation.Describe();
  MutexLock lock(&mutex_);
  const auto entry = entries_.find(KeyOf(generation));
  if (entry != entries_.end() && entry->second.expires) {
    job.mutable_expire_time()->set_seconds(
        std::chrono::system_clock::to_time_t(*entry->second.expires));
  }
  return job;
}

v1::ListJobsResponse Jobs::List(const std::optional<std::string>& client, size_t size,
                                uint64_t before, int64_t max_bytes) const {
  std::vector<std::pair<uint64_t, std::shared_ptr<Generation>>> found;
  {
    MutexLock lock(&mutex_);
    auto entry = client ? entries_.lower_bound({*client, ""}) : entries_.begin();
    for (; entry != entries_.end() && (!client || entry->first.first == *client); ++entry) {
      const Entry& each = entry->second;
      if (each.number < before) found.emplace_back(each.number, each.generation);
    }
  }
  const auto end = found.begin() + static_cast<ptrdiff_t>(std::min(size, found.size()));
  std::partial_sort(found.begin(), end, found.end(), std::greater<>());
  v1::ListJobsResponse response;
  const auto framed = [](size_t bytes) {  // with tag and length
    return static_cast<int64_t>(1 + google::protobuf::io::CodedOutputStream::VarintSize64(bytes) +
                                bytes);
  };
  int64_t bytes = framed(std::numeric_limits<uint64_t>::digits10 + 1);  // next_page_token
  auto each = found.begin();
  for (; each != end; ++each) {
    v1::Job job = Describe(*each->second);
    bytes += framed(job.ByteSizeLong());
    if (bytes > max_bytes && each != found.begin()) break;
    *response.add_jobs() = std::move(job);
  }
  if (each != found.end()) response.set_next_page_token(std::to_string(std::prev(each)->first));
  return response;
}

void Jobs::Ended(const std::shared_ptr<Generation>& generation) {
  const bool keep = generation->origin().kept && generation->accepted();
  MutexLock lock(&mutex_);
  const auto entry = entries_.find(KeyOf(*generation));
  // A retry may have replaced it.
  if (entry == entries_.end() || entry->second.generation != generation) return;
  const size_t bytes = kEntryBytes + entry->second.asked_bytes + generation->bytes();
  if (!keep || bytes > static_cast<size_t>(retention_.max_bytes)) {
    entries_.erase(entry);
    return;
  }
  entry->second.expires = std::chrono::system_clock::now() + retention_.time;
  kept_.push_back({generation, bytes, Clock::now() + retention_.time});
  kept_bytes_ += bytes;
  while (kept_bytes_ > static_cast<size_t>(retention_.max_bytes)) DropOldest();
}

void Jobs::Expire() {
  MutexLock lock(&mutex_);
  while (!kept_.empty() && kept_.front().expires <= Clock::now()) DropOldest();
  const size_t running = RunningBytes();
  while (!kept_.empty() && running + kept_bytes_ > static_cast<size_t>(retention_.max_bytes)) {
    DropOldest();
  }
}

size_t Jobs::RunningBytes() const {
  size_t bytes = 0;
  for (const auto& [key, entry] : entries_) {
    if (!entry.expires) bytes += entry.generation->bytes();
  }
  return bytes;
}

void Jobs::DropOldest() {
  const Key key = KeyOf(*kept_.front().generation);
  kept_bytes_ -= kept_.front().bytes;
  kept_.pop_front();
  entries_.erase(key);
}

void Jobs::Forget(const Generation& generation) {
  const auto kept = std::find_if(kept_.begin(), kept_.end(), [&](const Kept& each) {
    return each.generation.get() == &generation;
  });
  if (kept == kept_.end()) return;
  kept_bytes_ -= kept->bytes;
  kept_.erase(kept);
}

size_t Jobs::bytes() const {
  MutexLock lock(&mutex_);
  size_t bytes = event_bytes_;
  for (const Kept& each : kept_) bytes += each.bytes - each.generation->bytes();
  return bytes;
}

std::map<std::pair<std::string, v1::JobState>, int> Jobs::CountByState() const {
  MutexLock lock(&mutex_);
  std::map<std::pair<std::string, v1::JobState>, int> counts;
  for (const auto& [key, entry] : entries_) ++counts[entry.generation->ModelAndState()];
  return counts;
}

}  // namespace denoised
