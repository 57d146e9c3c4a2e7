// SPDX-License-Identifier: Apache-2.0
// What servers and channels are made with: arguments and certificates.
#pragma once

#include <grpc/grpc.h>
#include <grpc/grpc_security.h>

#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <variant>
#include <vector>

namespace twinpool::transport {

/// Channel arguments by name. They own their text.
using Arguments = std::vector<std::pair<std::string, std::variant<int, std::string>>>;

/// PEM texts: the authorities that the other side's certificate must come from, our key and our chain.
struct Certificates {
  std::string roots;
  std::string key;
  std::string chain;
};

/// Asked at each handshake: none if the present certificates still hold.
using FetchCertificates = std::function<std::optional<Certificates>()>;

/// gRPC's own form of arguments. Valid as long as `arguments` is.
std::vector<grpc_arg> grpc_args_of(const Arguments& arguments);

/// Credentials of a server that demands and checks client certificates; `fetch` has the certificates at the first call.
/// The caller releases them, and keeps `fetch` where it is for as long as the server lives.
grpc_server_credentials* server_credentials(FetchCertificates& fetch);

grpc_channel_credentials* channel_credentials(const Certificates& certificates);

}  // namespace twinpool::transport
