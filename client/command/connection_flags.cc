// SPDX-License-Identifier: Apache-2.0
#include "command/connection_flags.h"

#include <optional>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/escaping.h"
#include "command/completion.h"

namespace denoised::command {
namespace {

/// "key: value", as curl and grpcurl take it; nullopt for anything else.
std::optional<std::pair<std::string, std::string>> ParseHeader(const std::string& text) {
  const size_t colon = text.find(':');
  if (colon == 0 || colon == std::string::npos) return std::nullopt;
  std::string key = text.substr(0, colon), value = text.substr(colon + 1);
  absl::StripAsciiWhitespace(&key);
  absl::StripAsciiWhitespace(&value);
  absl::AsciiStrToLower(&key);
  if (!key.ends_with("-bin")) return std::pair(key, value);
  std::string bytes;
  if (!absl::Base64Unescape(value, &bytes)) return std::nullopt;
  return std::pair(key, bytes);
}

CLI::Validator Header() {
  return CLI::Validator(
      [](std::string& text) {
        return ParseHeader(text) ? std::string()
                                 : "\"" + text +
                                       "\" is not a header; use 'key: value', and base64 for the "
                                       "value of a key that ends in -bin";
      },
      "");
}

}  // namespace

void AddConnectionFlags(CLI::App& app, ConnectionFlags& flags) {
  app.add_option("--server", flags.server,
                 "Address of the server, host:port. Several servers are called in turn: "
                 "dns:///name:port for all addresses of a name, or a list ip:port,ip:port")
      ->envname("DENOISE_SERVER")
      ->capture_default_str();
  app.add_option("--context", flags.context,
                 "Take the options of the connection from this context; see denoise context. "
                 "Default: the current context, unless --server is given. '' takes none")
      ->type_name(kContext)
      ->envname("DENOISE_CONTEXT");
  app.add_flag("--tls", flags.tls,
               "Encrypt the connection. Any of the --tls options below turns it on")
      ->envname("DENOISE_TLS");
  app.add_option("--tls-ca", flags.files.ca_file,
                 "Trust the certificate authorities in this PEM file. Default: those of the system")
      ->type_name(kFile)
      ->envname("DENOISE_TLS_CA");
  app.add_option("--tls-cert", flags.files.cert_file, "Client certificate for mutual TLS, PEM file")
      ->type_name(kFile)
      ->envname("DENOISE_TLS_CERT");
  app.add_option("--tls-key", flags.files.key_file, "Private key of --tls-cert, PEM file")
      ->type_name(kFile)
      ->envname("DENOISE_TLS_KEY");
  app.add_option(
         "--tls-server-name", flags.files.server_name,
         "Expect this name in the server's certificate. Default: the host of --server. A list of "
         "servers needs it")
      ->envname("DENOISE_TLS_SERVER_NAME");
  app.add_option(
         "--token-file", flags.token_file,
         "Send the bearer token in this file with every call. Needs TLS or --allow-plaintext-token")
      ->type_name(kFile)
      ->envname("DENOISE_TOKEN_FILE");
  app.add_flag("--allow-plaintext-token", flags.allow_plaintext_token,
               "Send the token without TLS too. Only where something else encrypts the connection, "
               "such as a service mesh")
      ->envname("DENOISE_ALLOW_PLAINTEXT_TOKEN");
  app.add_option(
         "-H,--header", flags.headers,
         "Send this metadata with every call: 'key: value'. Can be repeated; the value of a "
         "key that ends in -bin is base64")
      ->allow_extra_args(false)
      ->check(Header());
  app.add_option("--traceparent", flags.traceparent,
                 "Continue this trace (W3C Trace Context): 00-TRACE_ID-SPAN_ID-FLAGS")
      ->envname("TRACEPARENT");
}

client::ConnectionOptions ToOptions(const ConnectionFlags& flags) {
  client::ConnectionOptions options;
  const client::TlsOptions& files = flags.files;
  if (flags.tls || !files.ca_file.empty() || !files.cert_file.empty() || !files.key_file.empty() ||
      !files.server_name.empty()) {
    options.tls = files;
  }
  options.token_file = flags.token_file;
  options.allow_plaintext_token = flags.allow_plaintext_token;
  return options;
}

client::CallOptions ToCallOptions(const ConnectionFlags& flags, std::stop_token stop) {
  client::CallOptions options = {.stop = std::move(stop), .traceparent = flags.traceparent};
  for (const std::string& header : flags.headers) options.metadata.push_back(*ParseHeader(header));
  return options;
}

}  // namespace denoised::command
