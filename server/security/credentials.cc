// SPDX-License-Identifier: Apache-2.0
#include "server/security/credentials.h"

#include <openssl/pem.h>
#include <openssl/x509.h>

#include <algorithm>
#include <ctime>
#include <vector>

#include "server/security/clients.h"
#include "server/telemetry/log.h"
#include "server/telemetry/metrics.h"

namespace denoised {
namespace {

template <typename T, void (*Free)(T*)>
struct Deleter {
  void operator()(T* object) const { Free(object); }
};
using Certificate = std::unique_ptr<X509, Deleter<X509, X509_free>>;
using Key = std::unique_ptr<EVP_PKEY, Deleter<EVP_PKEY, EVP_PKEY_free>>;

void FreeBio(BIO* bio) { BIO_free(bio); }
using File = std::unique_ptr<BIO, Deleter<BIO, FreeBio>>;

absl::StatusOr<File> OpenFile(const char* flag, const std::string& path) {
  File file(BIO_new_file(path.c_str(), "r"));
  if (file == nullptr) {
    return NotFound("{}: \"{}\" cannot be read; give a PEM file", flag, path);
  }
  return file;
}

absl::StatusOr<Certificate> ReadCertificate(const char* flag, const std::string& path) {
  DENOISED_ASSIGN_OR_RETURN(const File file, OpenFile(flag, path));
  Certificate certificate(PEM_read_bio_X509(file.get(), nullptr, nullptr, nullptr));
  if (certificate == nullptr) {
    return InvalidArgument(
        "{}: \"{}\" holds no certificate in PEM, \"-----BEGIN CERTIFICATE-----\"", flag, path);
  }
  return certificate;
}

/// Health needs no token: load balancers and kubelets have none, and it reveals nothing else.
constexpr std::string_view kOpenService = "/grpc.health.v1.Health/";

/// The compiled-in method of a path such as "/denoised.v1.ImageGeneration/Generate", or null. A
/// client can send any path, but must not be able to create metric labels.
const google::protobuf::MethodDescriptor* FindMethod(std::string_view path) {
  if (path.empty()) return nullptr;
  std::string name(path.substr(1));
  if (const size_t slash = name.find('/'); slash != std::string::npos) name[slash] = '.';
  return google::protobuf::DescriptorPool::generated_pool()->FindMethodByName(name);
}

/// Checks the calls of every service of the port, including those of gRPC itself.
class Gate final : public grpc::AuthMetadataProcessor {
 public:
  Gate(const Clients* clients, Metrics* metrics) : clients_(clients), metrics_(metrics) {}

  bool IsBlocking() const override { return false; }

  grpc::Status Process(const InputMetadata& metadata, grpc::AuthContext* connection,
                       OutputMetadata*, OutputMetadata*) override {
    const std::string_view path = MetadataValue(metadata, ":path");
    if (path.substr(0, kOpenService.size()) == kOpenService) return grpc::Status::OK;
    const auto caller = clients_->Identify(CredentialsOf(metadata, connection));
    if (caller.ok()) return grpc::Status::OK;
    const auto* method = FindMethod(path);
    metrics_->CallRefused(method);
    log::Info("request", {{"method", method == nullptr ? "unknown" : method->name()},
                          {"code", "UNAUTHENTICATED"},
                          {"error", std::string(caller.status().message())}});
    return {grpc::StatusCode::UNAUTHENTICATED, std::string(caller.status().message())};
  }

 private:
  const Clients* const clients_;
  Metrics* const metrics_;
};

}  // namespace

absl::Status CheckCertificate(const SecurityConfig& config) {
  DENOISED_ASSIGN_OR_RETURN(const Certificate certificate,
                            ReadCertificate("--tls-cert", config.tls_cert));
  DENOISED_ASSIGN_OR_RETURN(const File file, OpenFile("--tls-key", config.tls_key));
  const auto no_passphrase = [](char*, int, int, void*) { return 0; };
  const Key key(PEM_read_bio_PrivateKey(file.get(), nullptr, no_passphrase, nullptr));
  if (key == nullptr) {
    return InvalidArgument("--tls-key: \"{}\" holds no private key in PEM without a passphrase",
                           config.tls_key);
  }
  if (X509_check_private_key(certificate.get(), key.get()) != 1) {
    return InvalidArgument(
        "--tls-key: \"{}\" is not the key of the first certificate in \"{}\"; give the two that "
        "were made together",
        config.tls_key, config.tls_cert);
  }
  return absl::OkStatus();
}

absl::Status CheckClientAuthority(const SecurityConfig& config) {
  return ReadCertificate("--tls-client-ca", config.tls_client_ca).status();
}

std::optional<std::chrono::system_clock::time_point> CertificateExpiry(
    const SecurityConfig& config) {
  if (!config.tls()) return std::nullopt;
  const auto certificate = ReadCertificate("--tls-cert", config.tls_cert);
  std::tm time{};
  if (!certificate.ok() || ASN1_TIME_to_tm(X509_get0_notAfter(certificate->get()), &time) != 1) {
    return std::nullopt;
  }
  return std::chrono::system_clock::from_time_t(timegm(&time));
}

std::string_view MetadataValue(const std::multimap<grpc::string_ref, grpc::string_ref>& metadata,
                               const char* key) {
  const auto it = metadata.find(key);
  if (it == metadata.end()) return {};
  return {it->second.data(), it->second.size()};
}

Credentials CredentialsOf(const std::multimap<grpc::string_ref, grpc::string_ref>& metadata,
                          const grpc::AuthContext* connection) {
  Credentials credentials{.authorization = MetadataValue(metadata, "authorization")};
  for (const char* header : {"x-forwarded-for", "forwarded", "via"}) {
    credentials.forwarded = credentials.forwarded || metadata.count(header) > 0;
  }
  std::vector<grpc::string_ref> names;
  if (connection != nullptr) names = connection->GetPeerIdentity();
  for (const grpc::string_ref& name : names) {
    credentials.certificate.emplace_back(name.data(), name.size());
  }
  return credentials;
}

absl::StatusOr<std::shared_ptr<grpc::ServerCredentials>> MakeServerCredentials(
    const SecurityConfig& config, const Clients* clients, Metrics* metrics) {
  if (!config.tls() && config.clients.empty()) return grpc::InsecureServerCredentials();
  if (!config.tls()) {
    // Only these credentials support a check without TLS. With them gRPC accepts connections on
    // loopback only.
    auto local = grpc::experimental::LocalServerCredentials(LOCAL_TCP);
    local->SetAuthMetadataProcessor(std::make_shared<Gate>(clients, metrics));
    return local;
  }
  // gRPC reads the files on a thread of its own and does not report errors in them: connections
  // would just fail.
  DENOISED_RETURN_IF_ERROR(CheckCertificate(config));
  if (!config.tls_client_ca.empty()) DENOISED_RETURN_IF_ERROR(CheckClientAuthority(config));
  const auto expiry = CertificateExpiry(config);
  if (expiry && *expiry < std::chrono::system_clock::now()) {
    log::Warning("the certificate has expired; clients will refuse it",
                 {{"file", config.tls_cert}});
  }
  namespace tls = grpc::experimental;
  const auto seconds = static_cast<unsigned>(config.refresh.count() / 1000);
  tls::TlsServerCredentialsOptions options(std::make_shared<tls::FileWatcherCertificateProvider>(
      config.tls_key, config.tls_cert, config.tls_client_ca, std::max(1u, seconds)));
  options.watch_identity_key_cert_pairs();
  if (!config.tls_client_ca.empty()) {
    options.watch_root_certs();
    options.set_cert_request_type(GRPC_SSL_REQUEST_AND_REQUIRE_CLIENT_CERTIFICATE_AND_VERIFY);
  }
  auto credentials = tls::TlsServerCredentials(options);
  credentials->SetAuthMetadataProcessor(std::make_shared<Gate>(clients, metrics));
  return credentials;
}

}  // namespace denoised
