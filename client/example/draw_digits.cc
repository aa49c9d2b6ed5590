// SPDX-License-Identifier: Apache-2.0
// Draws the digits 0, 1 and 2 and tells how far it is: draw_digits [host:port]
#include <denoised/client.h>

#include <fstream>
#include <iostream>

namespace client = denoised::client;

int main(int argc, char** argv) {
  const auto connection = client::Connect(argc > 1 ? argv[1] : "127.0.0.1:50051");
  if (!connection.ok()) {
    std::cerr << connection.status() << "\n";
    return 1;
  }
  const auto on_event = [](const client::Event& event) {
    if (const auto* progress = std::get_if<client::Progress>(&event)) {
      std::cout << progress->evaluations_done << "/" << progress->evaluations_total << "\n";
    } else if (const auto* image = std::get_if<client::Image>(&event)) {
      const std::string path = "digit-" + std::to_string(image->index) + ".png";
      std::ofstream(path, std::ios::binary) << std::get<std::string>(image->content);
      std::cout << path << "\n";
    }
  };
  const client::Generation digits = {.seed = 42, .count = 3, .class_labels = {0, 1, 2}};
  const auto call = client::Client(*connection).StreamGenerate(digits, {}, {.on_event = on_event});
  if (const absl::Status status = call->Wait(); !status.ok()) {
    std::cerr << status << "\n";
    for (const auto& violation : client::Details(status).field_violations) {
      std::cerr << violation.field << " " << violation.description << "\n";
    }
    return 1;
  }
}
