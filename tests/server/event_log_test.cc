// SPDX-License-Identifier: Apache-2.0
#include "server/jobs/event_log.h"

#include <gtest/gtest.h>

namespace denoised {
namespace {

using Event = EventLog::Event;

Event Progress(int done) {
  Event event;
  event.mutable_progress()->set_evaluations_done(done);
  return event;
}
Event Queued(int position) {
  Event event;
  event.mutable_queued()->set_position(position);
  return event;
}
Event Preview(int index, int evaluation) {
  Event event;
  event.mutable_preview()->set_evaluation(evaluation);
  event.mutable_preview()->mutable_image()->set_index(index);
  return event;
}
Event Image(int index) {
  Event event;
  event.mutable_image()->mutable_image()->set_index(index);
  return event;
}

/// The kinds and numbers of what a reader that knows events up to `sequence` is told, such as
/// "1:progress1 2:image0".
std::string ReadAll(const EventLog& log, uint64_t sequence = 0) {
  std::string text;
  while (const auto event = log.After(sequence)) {
    EXPECT_EQ(event->request_id(), "r");
    sequence = event->sequence();
    text += (text.empty() ? "" : " ") + std::to_string(sequence) + ":";
    switch (event->event_case()) {
      case Event::kQueued:
        text += "queued" + std::to_string(event->queued().position());
        break;
      case Event::kProgress:
        text += "progress" + std::to_string(event->progress().evaluations_done());
        break;
      case Event::kPreview:
        text += "preview" + std::to_string(event->preview().image().index()) + "@" +
                std::to_string(event->preview().evaluation());
        break;
      case Event::kImage:
        text += "image" + std::to_string(event->image().image().index());
        break;
      default:
        text += "other";
    }
  }
  return text;
}

TEST(EventLogTest, AReaderThatKeepsUpSeesEverything) {
  std::atomic<size_t> all = 0;
  EventLog log("r", &all);
  log.Push(Progress(1));
  EXPECT_EQ(ReadAll(log), "1:progress1");
  log.Push(Preview(0, 1));
  EXPECT_EQ(ReadAll(log, 1), "2:preview0@1");
  log.Push(Progress(2));
  log.Push(Image(0));
  log.Push(Event());
  EXPECT_EQ(ReadAll(log, 2), "3:progress2 4:image0 5:other");
  EXPECT_EQ(ReadAll(log, log.last_sequence()), "");
}

TEST(EventLogTest, ASlowReaderGetsTheLatestOfEachAndEveryImage) {
  std::atomic<size_t> all = 0;
  EventLog log("r", &all);
  for (int i = 1; i <= 100; ++i) {
    log.Push(Progress(i));
    log.Push(Preview(0, i));
    log.Push(Preview(1, i));
    if (i % 50 == 0) log.Push(Image(1 + i / 50));
  }
  EXPECT_EQ(ReadAll(log),
            "151:image2 299:progress100 300:preview0@100 301:preview1@100 302:image3");
}

TEST(EventLogTest, OnlyTheLatestPlaceIsKept) {
  std::atomic<size_t> all = 0;
  EventLog log("r", &all);
  log.Push(Queued(2));
  log.Push(Queued(1));
  EXPECT_EQ(ReadAll(log), "2:queued1");
  log.Forget(2);
  log.Push(Queued(0));
  log.Push(Event());
  EXPECT_EQ(ReadAll(log), "3:queued0 4:other");
}

TEST(EventLogTest, NoPreviewAfterItsImage) {
  std::atomic<size_t> all = 0;
  EventLog log("r", &all);
  log.Push(Preview(0, 1));
  log.Push(Preview(1, 1));
  log.Push(Image(0));
  EXPECT_EQ(ReadAll(log), "2:preview1@1 3:image0");
}

TEST(EventLogTest, ReadersDoNotDisturbEachOther) {
  std::atomic<size_t> all = 0;
  EventLog log("r", &all);
  log.Push(Image(0));
  log.Push(Image(1));
  EXPECT_EQ(ReadAll(log), ReadAll(log));
  EXPECT_EQ(ReadAll(log, 1), "2:image1");
}

TEST(EventLogTest, ForgottenEventsTakeNoMemory) {
  std::atomic<size_t> all = 0;
  EventLog log("r", &all);
  EXPECT_EQ(log.bytes(), 0u);
  log.Push(Progress(1));
  log.Push(Image(0));
  const size_t bytes = log.bytes();
  log.Push(Progress(2));
  EXPECT_EQ(log.bytes(), bytes) << "the first progress is still counted";
  log.Forget(2);
  EXPECT_EQ(ReadAll(log), "3:progress2");
  EXPECT_LT(log.bytes(), bytes);
  log.Push(Progress(3));
  log.Forget(log.last_sequence());
  EXPECT_EQ(ReadAll(log), "");
  EXPECT_EQ(log.bytes(), 0u);
}

}  // namespace
}  // namespace denoised
