// SPDX-License-Identifier: Apache-2.0
#include "transport/options.h"

namespace twinpool::transport {

namespace {

grpc_ssl_certificate_config_reload_status fetch_certificates(void* user_data,
                                                             grpc_ssl_server_certificate_config** config) {
  const std::optional<Certificates> fresh = (*static_cast<FetchCertificates*>(user_data))();
  if (!fresh) {
    return GRPC_SSL_CERTIFICATE_CONFIG_RELOAD_UNCHANGED;
  }
  const grpc_ssl_pem_key_cert_pair pair{fresh->key.c_str(), fresh->chain.c_str()};
  *config = grpc_ssl_server_certificate_config_create(fresh->roots.c_str(), &pair, 1);
  return GRPC_SSL_CERTIFICATE_CONFIG_RELOAD_NEW;
}

}  // namespace

std::vector<grpc_arg> grpc_args_of(const Arguments& arguments) {
  std::vector<grpc_arg> args;
  args.reserve(arguments.size());
  for (const auto& [name, value] : arguments) {
    grpc_arg arg{};
    arg.key = const_cast<char*>(name.c_str());
    if (const auto* number = std::get_if<int>(&value)) {
      arg.type = GRPC_ARG_INTEGER;
      arg.value.integer = *number;
    } else {
      arg.type = GRPC_ARG_STRING;
      arg.value.string = const_cast<char*>(std::get<std::string>(value).c_str());
    }
    args.push_back(arg);
  }
  return args;
}

grpc_server_credentials* server_credentials(FetchCertificates& fetch) {
  return grpc_ssl_server_credentials_create_with_options(
      grpc_ssl_server_credentials_create_options_using_config_fetcher(
          GRPC_SSL_REQUEST_AND_REQUIRE_CLIENT_CERTIFICATE_AND_VERIFY, fetch_certificates, &fetch));
}

grpc_channel_credentials* channel_credentials(const Certificates& certificates) {
  grpc_ssl_pem_key_cert_pair pair{certificates.key.c_str(), certificates.chain.c_str()};
  return grpc_ssl_credentials_create_ex(certificates.roots.c_str(), &pair, nullptr, nullptr);
}

}  // namespace twinpool::transport
