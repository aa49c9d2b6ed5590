// SPDX-License-Identifier: Apache-2.0
#include "denoised/tls_files.h"

#include <fmt/format.h>
#include <openssl/err.h>
#include <openssl/pem.h>
#include <openssl/x509.h>

#include <memory>

#include "denoised/read_file.h"

namespace denoised::client {
namespace {

using Certificate = std::unique_ptr<X509, void (*)(X509*)>;
using Key = std::unique_ptr<EVP_PKEY, void (*)(EVP_PKEY*)>;

std::unique_ptr<BIO, int (*)(BIO*)> Reader(const std::string& pem) {
  return {BIO_new_mem_buf(pem.data(), static_cast<int>(pem.size())), BIO_free};
}

/// The first one of a file.
absl::StatusOr<Certificate> ParseCertificate(const char* option, const std::string& path,
                                             const std::string& pem) {
  Certificate certificate(PEM_read_bio_X509(Reader(pem).get(), nullptr, nullptr, nullptr),
                          X509_free);
  if (certificate == nullptr) {
    return absl::InvalidArgumentError(fmt::format(
        "{}: \"{}\" holds no certificate in PEM, \"-----BEGIN CERTIFICATE-----\"", option, path));
  }
  return certificate;
}

absl::StatusOr<Key> ParseKey(const char* option, const std::string& path, const std::string& pem) {
  const auto no_passphrase = [](char*, int, int, void*) { return 0; };
  Key key(PEM_read_bio_PrivateKey(Reader(pem).get(), nullptr, no_passphrase, nullptr),
          EVP_PKEY_free);
  if (key == nullptr) {
    return absl::InvalidArgumentError(
        fmt::format("{}: \"{}\" holds no private key in PEM without a passphrase", option, path));
  }
  return key;
}

absl::StatusOr<grpc::SslCredentialsOptions> Read(const TlsOptions& tls) {
  grpc::SslCredentialsOptions files;
  if (!tls.ca_file.empty()) {
    auto pem = ReadFile("tls.ca_file", tls.ca_file);
    if (!pem.ok()) return pem.status();
    const auto authority = ParseCertificate("tls.ca_file", tls.ca_file, *pem);
    if (!authority.ok()) return authority.status();
    files.pem_root_certs = *std::move(pem);
  }
  if (tls.cert_file.empty()) return files;
  auto chain = ReadFile("tls.cert_file", tls.cert_file);
  if (!chain.ok()) return chain.status();
  auto secret = ReadFile("tls.key_file", tls.key_file);
  if (!secret.ok()) return secret.status();
  const auto certificate = ParseCertificate("tls.cert_file", tls.cert_file, *chain);
  if (!certificate.ok()) return certificate.status();
  const auto key = ParseKey("tls.key_file", tls.key_file, *secret);
  if (!key.ok()) return key.status();
  if (X509_check_private_key(certificate->get(), key->get()) != 1) {
    return absl::InvalidArgumentError(
        fmt::format("tls.key_file: \"{}\" is not the key of the first certificate in \"{}\"; give "
                    "the two that were made together",
                    tls.key_file, tls.cert_file));
  }
  files.pem_cert_chain = *std::move(chain);
  files.pem_private_key = *std::move(secret);
  return files;
}

}  // namespace

absl::StatusOr<grpc::SslCredentialsOptions> ReadTlsFiles(const TlsOptions& tls) {
  auto files = Read(tls);
  ERR_clear_error();  // of this thread: what reads it next would take ours for its own
  return files;
}

}  // namespace denoised::client
