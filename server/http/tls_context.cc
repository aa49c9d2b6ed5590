// SPDX-License-Identifier: Apache-2.0
#include "server/http/tls_context.h"

#include <arpa/inet.h>
#include <openssl/ssl.h>
#include <openssl/x509v3.h>

#include <array>
#include <boost/asio/error.hpp>
#include <optional>
#include <utility>

#include "server/security/credentials.h"
#include "server/security/file_version.h"
#include "server/telemetry/log.h"

namespace denoised {
namespace {

namespace ssl = boost::asio::ssl;

std::string VersionOf(const SecurityConfig& config) {
  return FileVersion(config.tls_cert) + " " + FileVersion(config.tls_key) + " " +
         FileVersion(config.tls_client_ca);
}

/// The port speaks HTTP/1.1; a client that speaks HTTP/2 alone is refused by the handshake.
int ChooseProtocol(SSL*, const unsigned char** chosen, unsigned char* size,
                   const unsigned char* offered, unsigned int offered_size, void*) {
  static constexpr unsigned char kProtocols[] = "\x08http/1.1";
  unsigned char* selected = nullptr;
  if (SSL_select_next_proto(&selected, size, kProtocols, sizeof(kProtocols) - 1, offered,
                            offered_size) != OPENSSL_NPN_NEGOTIATED) {
    return SSL_TLSEXT_ERR_ALERT_FATAL;
  }
  *chosen = selected;
  return SSL_TLSEXT_ERR_OK;
}

/// In UTF-8, whatever the certificate has it in; nothing if it is no text.
std::optional<std::string> Text(const ASN1_STRING* string) {
  unsigned char* utf8 = nullptr;
  const int size = ASN1_STRING_to_UTF8(&utf8, string);
  if (size < 0) return std::nullopt;
  std::string text(reinterpret_cast<const char*>(utf8), static_cast<size_t>(size));
  OPENSSL_free(utf8);
  return text;
}

}  // namespace

absl::StatusOr<std::unique_ptr<TlsContext>> TlsContext::Open(const SecurityConfig& config) {
  std::unique_ptr<TlsContext> tls(new TlsContext(config));
  MutexLock lock(&tls->mutex_);
  tls->version_ = VersionOf(config);
  DENOISED_ASSIGN_OR_RETURN(tls->context_, tls->Read());
  tls->checked_ = std::chrono::steady_clock::now();
  return tls;
}

absl::StatusOr<std::shared_ptr<ssl::context>> TlsContext::Read() const {
  DENOISED_RETURN_IF_ERROR(CheckCertificate(config_));
  if (!config_.tls_client_ca.empty()) DENOISED_RETURN_IF_ERROR(CheckClientAuthority(config_));
  auto context = std::make_shared<ssl::context>(ssl::context::tls_server);
  boost::system::error_code error;
  const auto failed = [&error](const char* flag, const std::string& path) {
    return InvalidArgument("{}: \"{}\": {}", flag, path, error.message());
  };
  SSL_CTX_set_min_proto_version(context->native_handle(), TLS1_2_VERSION);
  SSL_CTX_set_options(context->native_handle(), SSL_OP_NO_RENEGOTIATION);
  SSL_CTX_set_alpn_select_cb(context->native_handle(), ChooseProtocol, nullptr);
  context->use_certificate_chain_file(config_.tls_cert, error);
  if (error) return failed("--tls-cert", config_.tls_cert);
  context->use_private_key_file(config_.tls_key, ssl::context::pem, error);
  if (error) return failed("--tls-key", config_.tls_key);
  if (!config_.tls_client_ca.empty()) {
    context->load_verify_file(config_.tls_client_ca, error);
    if (error) return failed("--tls-client-ca", config_.tls_client_ca);
    context->set_verify_mode(ssl::verify_peer | ssl::verify_fail_if_no_peer_cert, error);
    // A client of another authority must not come in with the session of an earlier one.
    SSL_CTX_set_session_cache_mode(context->native_handle(), SSL_SESS_CACHE_OFF);
    SSL_CTX_set_options(context->native_handle(), SSL_OP_NO_TICKET);
    SSL_CTX_set_num_tickets(context->native_handle(), 0);
  }
  return context;
}

std::shared_ptr<ssl::context> TlsContext::Current() {
  MutexLock lock(&mutex_);
  const auto now = std::chrono::steady_clock::now();
  if (now - checked_ < config_.refresh) return context_;
  checked_ = now;
  std::string version = VersionOf(config_);
  if (version == version_) return context_;
  if (auto read = Read(); read.ok()) {
    context_ = *std::move(read);
    version_ = std::move(version);
    log::Info("certificate of the HTTP port read again");
  } else if (version != failed_version_) {
    // Perhaps the key of a new certificate is still to come: tried again at the next look, and told
    // once.
    failed_version_ = std::move(version);
    log::Error("certificate of the HTTP port not read again; the one known before stays",
               {{"error", std::string(read.status().message())}});
  }
  return context_;
}

std::vector<std::string> CertificateNames(SSL* connection) {
  std::vector<std::string> names;
  const std::unique_ptr<X509, decltype(&X509_free)> certificate(
      SSL_get1_peer_certificate(connection), X509_free);
  if (certificate == nullptr || SSL_get_verify_result(connection) != X509_V_OK) return names;
  const std::unique_ptr<GENERAL_NAMES, decltype(&GENERAL_NAMES_free)> alternatives(
      static_cast<GENERAL_NAMES*>(
          X509_get_ext_d2i(certificate.get(), NID_subject_alt_name, nullptr, nullptr)),
      GENERAL_NAMES_free);
  const auto take = [&names](const ASN1_STRING* string) {
    if (auto text = Text(string)) names.push_back(*std::move(text));
  };
  for (int i = 0; i < sk_GENERAL_NAME_num(alternatives.get()); ++i) {
    const GENERAL_NAME* name = sk_GENERAL_NAME_value(alternatives.get(), i);
    if (name->type == GEN_DNS) take(name->d.dNSName);
    if (name->type == GEN_EMAIL) take(name->d.rfc822Name);
    if (name->type == GEN_URI) take(name->d.uniformResourceIdentifier);
    if (name->type == GEN_IPADD) {
      const int size = ASN1_STRING_length(name->d.iPAddress);
      if (size != 4 && size != 16) continue;  // an address with a mask is no name
      std::array<char, INET6_ADDRSTRLEN> text{};
      if (inet_ntop(size == 4 ? AF_INET : AF_INET6, ASN1_STRING_get0_data(name->d.iPAddress),
                    text.data(), text.size()) != nullptr) {
        names.emplace_back(text.data());
      }
    }
  }
  if (!names.empty()) return names;
  const X509_NAME* subject = X509_get_subject_name(certificate.get());
  const int index = X509_NAME_get_index_by_NID(subject, NID_commonName, -1);
  if (index >= 0) {
    take(X509_NAME_ENTRY_get_data(X509_NAME_get_entry(subject, index)));
  }
  return names;
}

}  // namespace denoised
