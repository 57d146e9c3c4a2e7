// SPDX-License-Identifier: Apache-2.0
// A server that hands every call to the thread that serves, whatever its method.
#pragma once

#include <grpc/grpc.h>

#include <memory>
#include <string>
#include <unordered_set>
#include <vector>

#include "transport/call.h"
#include "transport/options.h"

namespace twinpool::transport {

class Server;

/// A call of a client.
class ServerCall : public Call {
 public:
  ServerCall(std::shared_ptr<Engine> engine, std::shared_ptr<Server> server);
  ~ServerCall() override;

  std::string method() const { return text_of(details_.method); }
  std::vector<Header> metadata() const { return headers_of(metadata_); }
  /// Of CLOCK_MONOTONIC, in seconds; infinity if there is none.
  double deadline() const;
  uint64_t server_id() const;

 private:
  friend class Server;
  void accept();
  void on_accepted(bool ok);
  void on_closed(bool ok);
  void received(grpc_byte_buffer* message) override;
  bool add_end(grpc_op& op) override;
  bool awaits_initial_metadata() const override { return false; }

  std::shared_ptr<Server> server_;
  Operation accept_;
  Operation close_;
  grpc_call_details details_;
  grpc_metadata_array metadata_;
  std::vector<grpc_metadata> trailing_;
  grpc_slice text_;
  int cancelled_ = 0;
  bool many_ = false;    // the client may send several messages
  bool opened_ = false;  // whoever serves knows of it
};

/// Bind, start, stop.
class Server : public std::enable_shared_from_this<Server> {
 public:
  Server(std::shared_ptr<Engine> engine, const Arguments& arguments, FetchCertificates fetch);
  ~Server();
  Server(const Server&) = delete;
  Server& operator=(const Server&) = delete;

  uint64_t id() const { return id_; }
  /// The port, which is the system's choice for 0; 0 if it cannot be had. With TLS where certificates were given.
  int bind(const std::string& address);
  /// `many`: the methods whose clients may send several messages. Others are opened with their one message.
  void start(std::vector<std::string> many);
  /// Connections are told to go away, new calls are refused. A `stopped` event follows the end of the last call.
  void stop();
  /// Cancels what runs. After `stop`.
  void cancel_all();

 private:
  friend class ServerCall;
  struct Stopped : Tag {
    explicit Stopped(Server* server)
        : owner(server) {}
    void complete(bool ok) override;
    Server* owner;
    std::shared_ptr<Server> alive;
  };

  void accept();

  std::shared_ptr<Engine> engine_;
  const uint64_t id_;
  std::shared_ptr<FetchCertificates> fetch_;  // the core has its address
  grpc_server* server_;
  Stopped stopped_{this};
  std::unordered_set<std::string> many_;
  bool started_ = false;
  bool stopping_ = false;
};

}  // namespace twinpool::transport
