// SPDX-License-Identifier: Apache-2.0
#include "tests/tls/certificates.h"

#include <openssl/crypto.h>
#include <openssl/evp.h>
#include <openssl/pem.h>
#include <openssl/rand.h>
#include <openssl/x509v3.h>

namespace denoised {
namespace {

/// Threads of gRPC may outlive main(). What OpenSSL keeps for each would be lost, which
/// LeakSanitizer reports, if OpenSSL were cleaned up before they end.
[[maybe_unused]] const int no_cleanup = OPENSSL_init_crypto(OPENSSL_INIT_NO_ATEXIT, nullptr);

EVP_PKEY* MakeKey() { return EVP_EC_gen("P-256"); }

template <typename Write>
std::string ToPem(const Write& write) {
  BIO* memory = BIO_new(BIO_s_mem());
  write(memory);
  char* data;
  const long size = BIO_get_mem_data(memory, &data);
  std::string text(data, static_cast<size_t>(size));
  BIO_free(memory);
  return text;
}

std::string ToPem(X509* certificate) {
  return ToPem([&](BIO* to) { PEM_write_bio_X509(to, certificate); });
}

void AddExtension(X509* certificate, X509* issuer, int nid, const std::string& value) {
  X509V3_CTX context;
  X509V3_set_ctx_nodb(&context);
  X509V3_set_ctx(&context, issuer, certificate, nullptr, nullptr, 0);
  X509_EXTENSION* extension = X509V3_EXT_conf_nid(nullptr, &context, nid, value.c_str());
  X509_add_ext(certificate, extension, -1);
  X509_EXTENSION_free(extension);
}

X509* MakeCertificate(const std::string& common_name, EVP_PKEY* key, X509* issuer,
                      std::chrono::seconds time) {
  X509* certificate = X509_new();
  X509_set_version(certificate, X509_VERSION_3);
  unsigned char serial[8];
  RAND_bytes(serial, sizeof(serial));
  serial[0] &= 0x7f;
  BIGNUM* number = BN_bin2bn(serial, sizeof(serial), nullptr);
  BN_to_ASN1_INTEGER(number, X509_get_serialNumber(certificate));
  BN_free(number);
  X509_gmtime_adj(X509_getm_notBefore(certificate), -60);
  X509_gmtime_adj(X509_getm_notAfter(certificate), time.count());
  X509_set_pubkey(certificate, key);
  X509_NAME* name = X509_get_subject_name(certificate);
  X509_NAME_add_entry_by_txt(name, "CN", MBSTRING_UTF8,
                             reinterpret_cast<const unsigned char*>(common_name.c_str()), -1, -1,
                             0);
  X509_set_issuer_name(certificate, X509_get_subject_name(issuer ? issuer : certificate));
  return certificate;
}

}  // namespace

struct TestAuthority::State {
  EVP_PKEY* key = MakeKey();
  X509* certificate =
      MakeCertificate("denoised test authority", key, nullptr, std::chrono::hours(1));
  std::string pem;
};

TestAuthority::TestAuthority() : state_(std::make_unique<State>()) {
  AddExtension(state_->certificate, state_->certificate, NID_basic_constraints, "critical,CA:TRUE");
  AddExtension(state_->certificate, state_->certificate, NID_key_usage, "critical,keyCertSign");
  X509_sign(state_->certificate, state_->key, EVP_sha256());
  state_->pem = ToPem(state_->certificate);
}

TestAuthority::~TestAuthority() {
  X509_free(state_->certificate);
  EVP_PKEY_free(state_->key);
}

const std::string& TestAuthority::certificate() const { return state_->pem; }

KeyPair TestAuthority::Issue(const std::string& common_name, const std::string& names,
                             std::chrono::seconds time) const {
  EVP_PKEY* key = MakeKey();
  X509* certificate = MakeCertificate(common_name, key, state_->certificate, time);
  if (!names.empty()) {
    AddExtension(certificate, state_->certificate, NID_subject_alt_name, names);
  }
  X509_sign(certificate, state_->key, EVP_sha256());
  KeyPair pair{ToPem(certificate), ToPem([&](BIO* to) {
                 PEM_write_bio_PrivateKey(to, key, nullptr, nullptr, 0, nullptr, nullptr);
               })};
  X509_free(certificate);
  EVP_PKEY_free(key);
  return pair;
}

}  // namespace denoised
