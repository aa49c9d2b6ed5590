#include "server/outbox.h"

#include <gtest/gtest.h>

namespace denoised {
namespace {

using Event = v1::StreamGenerateResponse;

Event Progress(int done) {
  Event event;
  event.mutable_progress()->set_evaluations_done(done);
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

/// The kinds and numbers of what leaves, such as "1:progress 2:image".
std::string PopAll(Outbox* outbox) {
  std::string text;
  while (auto event = outbox->Pop()) {
    EXPECT_EQ(event->request_id(), "r");
    text += (text.empty() ? "" : " ") + std::to_string(event->sequence()) + ":";
    switch (event->event_case()) {
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

TEST(OutboxTest, KeepsOrderForAReaderThatKeepsUp) {
  Outbox outbox("r");
  outbox.Push(Progress(1));
  EXPECT_EQ(PopAll(&outbox), "1:progress1");
  outbox.Push(Preview(0, 1));
  outbox.Push(Image(0));
  outbox.Push(Event());
  EXPECT_EQ(PopAll(&outbox), "2:image0 3:other");
}

TEST(OutboxTest, ASlowReaderGetsTheLatestOfEachAndEveryImage) {
  Outbox outbox("r");
  for (int i = 1; i <= 100; ++i) {
    outbox.Push(Progress(i));
    outbox.Push(Preview(0, i));
    outbox.Push(Preview(1, i));
    if (i % 50 == 0) outbox.Push(Image(1 + i / 50));
  }
  EXPECT_EQ(PopAll(&outbox), "1:image2 2:progress100 3:preview0@100 4:preview1@100 5:image3");
}

TEST(OutboxTest, NoPreviewAfterItsImage) {
  Outbox outbox("r");
  outbox.Push(Preview(0, 1));
  outbox.Push(Preview(1, 1));
  outbox.Push(Image(0));
  EXPECT_EQ(PopAll(&outbox), "1:preview1@1 2:image0");
}

TEST(OutboxTest, ClearLeavesNothing) {
  Outbox outbox("r");
  outbox.Push(Image(0));
  outbox.Clear();
  EXPECT_TRUE(outbox.empty());
  EXPECT_EQ(PopAll(&outbox), "");
}

}  // namespace
}  // namespace denoised
