#include "command/connection_flags.h"

namespace denoised::command {

void AddConnectionFlags(CLI::App& app, ConnectionFlags& flags) {
  app.add_option("--server", flags.server,
                 "Address of the server, host:port; or of replicas, to be asked in turn: "
                 "dns:///name:port for every address of a name, or ip:port,ip:port")
      ->envname("DENOISE_SERVER")
      ->capture_default_str();
  app.add_flag("--tls", flags.tls, "Encrypt the connection; also turned on by the following")
      ->envname("DENOISE_TLS");
  app.add_option("--tls-ca", flags.files.ca_file,
                 "Trust these authorities, PEM. Default: those of the system")
      ->envname("DENOISE_TLS_CA");
  app.add_option("--tls-cert", flags.files.cert_file,
                 "Show the server this certificate, PEM (mutual TLS)")
      ->envname("DENOISE_TLS_CERT");
  app.add_option("--tls-key", flags.files.key_file, "Private key of --tls-cert, PEM")
      ->envname("DENOISE_TLS_KEY");
  app.add_option("--tls-server-name", flags.files.server_name,
                 "Name in the server's certificate. Default: the host of --server; a list has none")
      ->envname("DENOISE_TLS_SERVER_NAME");
  app.add_option("--token-file", flags.token_file,
                 "Send the token in this file, as the server's operator gave it; needs TLS")
      ->envname("DENOISE_TOKEN_FILE");
}

client::ConnectionOptions ToOptions(const ConnectionFlags& flags) {
  client::ConnectionOptions options;
  const client::TlsOptions& files = flags.files;
  if (flags.tls || !files.ca_file.empty() || !files.cert_file.empty() || !files.key_file.empty() ||
      !files.server_name.empty()) {
    options.tls = files;
  }
  options.token_file = flags.token_file;
  return options;
}

}  // namespace denoised::command
