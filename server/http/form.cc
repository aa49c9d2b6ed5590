// SPDX-License-Identifier: Apache-2.0
#include "server/http/form.h"

#include <algorithm>
#include <boost/asio/buffer.hpp>
#include <boost/beast/core/string.hpp>
#include <boost/beast/http/empty_body.hpp>
#include <boost/beast/http/parser.hpp>
#include <boost/beast/http/rfc7230.hpp>
#include <utility>

#include "server/status/status_details.h"

namespace denoised {
namespace {

namespace http = boost::beast::http;

constexpr size_t kMaxParts = 256;
constexpr size_t kMaxPartHead = 8 << 10;

grpc::Status Broken(const std::string& problem) {
  return InvalidFields({{"body", "is no multipart form: " + problem}}, "");
}

/// The parameter of "form-data; name=\"image\""; empty when there is none.
std::string Parameter(std::string_view header, std::string_view name) {
  const size_t semicolon = header.find(';');
  if (semicolon == std::string_view::npos) return "";
  header.remove_prefix(semicolon);
  for (const auto& [key, value] :
       http::param_list(boost::beast::string_view(header.data(), header.size()))) {
    if (boost::beast::iequals(key, boost::beast::string_view(name.data(), name.size()))) {
      return std::string(value);
    }
  }
  return "";
}

/// Reads the headers of a part, which are written as those of HTTP are, with Beast's parser. They
/// end with an empty line.
bool ReadPartHead(std::string_view head, FormPart* part) {
  http::response_parser<http::empty_body> parser;
  parser.header_limit(kMaxPartHead);
  parser.eager(false);
  const std::string text = "HTTP/1.1 200 OK\r\n" + std::string(head);
  boost::system::error_code error;
  parser.put(boost::asio::buffer(text), error);
  if (error || !parser.is_header_done()) return false;
  const auto disposition = parser.get()[http::field::content_disposition];
  const std::string_view value(disposition.data(), disposition.size());
  part->name = Parameter(value, "name");
  return !part->name.empty();
}

}  // namespace

grpc::Status ParseForm(std::string_view content_type, std::string_view body,
                       std::vector<FormPart>* parts) {
  const std::string boundary = Parameter(content_type, "boundary");
  if (boundary.empty() || boundary.size() > 70) {
    return Broken("its Content-Type names no boundary of 1 to 70 characters");
  }
  const std::string delimiter = "\r\n--" + boundary;
  size_t position;  // after a delimiter
  if (body.substr(0, delimiter.size() - 2) == std::string_view(delimiter).substr(2)) {
    position = delimiter.size() - 2;
  } else {
    const size_t found = body.find(delimiter);
    if (found == std::string_view::npos) return Broken("it does not hold its boundary");
    position = found + delimiter.size();
  }
  while (true) {
    if (body.substr(position, 2) == "--") return grpc::Status::OK;
    const size_t line = body.find("\r\n", position);
    if (line == std::string_view::npos) return Broken("it ends in the middle");
    if (body.substr(position, line - position).find_first_not_of(" \t") != std::string_view::npos) {
      return Broken("a boundary goes on where its line should end");
    }
    const size_t head = line + 2;
    const size_t end = body.find(delimiter, line);
    if (end == std::string_view::npos) return Broken("its last part has no end");
    const size_t empty = body.find("\r\n\r\n", line);
    if (empty == std::string_view::npos || empty > end) {
      return Broken("a part has no empty line after its headers");
    }
    if (parts->size() == kMaxParts) return Broken("it has more than 256 parts");
    FormPart part;
    if (empty + 4 - head > kMaxPartHead ||
        !ReadPartHead(body.substr(head, empty + 4 - head), &part)) {
      return Broken("the headers of a part name no field");
    }
    const size_t begin = std::min(empty + 4, end);  // the delimiter may begin with that empty line
    part.body = body.substr(begin, end - begin);
    parts->push_back(std::move(part));
    position = end + delimiter.size();
  }
}

bool SetField(const std::string& name, const std::string& value, nlohmann::json* object) {
  constexpr int kMaxDepth = 8;
  const size_t bracket = name.find('[');
  std::string key = name.substr(0, bracket);
  std::string_view rest = std::string_view(name).substr(std::min(name.size(), key.size()));
  nlohmann::json* place = object;
  for (int depth = 0; depth < kMaxDepth; ++depth) {
    if (key.empty()) {  // "[]"
      if (place->is_null()) *place = nlohmann::json::array();
      if (!place->is_array()) return false;
      place->push_back(nullptr);
      place = &place->back();
    } else {
      if (place->is_null()) *place = nlohmann::json::object();
      if (!place->is_object()) return false;
      place = &(*place)[key];
    }
    if (rest.empty()) {
      if (!place->is_null()) return false;
      *place = value;
      return true;
    }
    const size_t close = rest.find(']');
    if (rest[0] != '[' || close == std::string_view::npos) return false;
    key = std::string(rest.substr(1, close - 1));
    rest.remove_prefix(close + 1);
  }
  return false;
}

}  // namespace denoised
