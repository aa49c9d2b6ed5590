# SPDX-License-Identifier: Apache-2.0
"""Makes tests/text/corpus.json and goldens.json: texts in many scripts and the ids that transformers
gives them.

usage: make_tokenizer_goldens.py [--first 0] [--output FILE]
corpus.json has what 100,000 texts are drawn from, which clip_tokenizer_test.cc draws as well, and hashes of
their ids, one for each thousand. goldens.json has the ids of texts by hand and of the first thousand of
these. If the test names another thousand, see its texts:

    make_tokenizer_goldens.py --first 37000 --output /tmp/others.json
    DENOISED_TOKENIZER_GOLDENS=/tmp/others.json build/dev/tests/text/text_test --gtest_filter='*Goldens*'

A text has assigned code points of Unicode 15.0 alone: later ones are letters to one library and
nothing to another. README.md in tests/text says more.
"""

import argparse
import json
from pathlib import Path

import transformers
from tokenizers import normalizers
from transformers import CLIPTokenizer

try:
    import unicodedata2 as unicodedata  # where Python's own has other tables
except ImportError:
    import unicodedata

TEXT = Path(__file__).parent.parent / "text"
VERSION = "5.23.0"
KINDS = ("sd1", "sd2", "added")
COUNT, BLOCK = 100_000, 1000
NFC = normalizers.NFC()

BY_HAND = """
a photo of an astronaut riding a horse on mars
Hello, World!! It's 2026: don't, we'll, I'd, they've, you're, I'M
'S 'T 'RE 'VE 'M 'LL 'D 's't're 'x ''s ' s
hello!!! a!b !a !! ! !!!
<|startoftext|> <|endoftext|> a<|endoftext|>b <|startoftext|><|startoftext|>
<|EndOfText|> <|STARTOFTEXT|> <|endofText|><|EndOfText|>!! !<|EndOfText|>. <|endoftext|
<|StartOfText|><|EndOfText|>.. x<|ENDOFTEXT|>y
<Cat-Toy> a <cat-toy>! <CAT-TOY>_1 <Cat-Toy>_1 <Cat-Toy>_12
</w> a</w>b <w> <unk> [PAD] <pad>
ΟΔΥΣΣΕΥΣ Σ ΣΑΣ ΌΣΟΣ ΣΣ
İstanbul IŞIK ıi İİ DİYARBAKIR
Straße STRASSE ẞ ﬁ ﬂ ﬀ ǅ ǆ Ǆ
Á A\u0301 é e\u0301 ê\u0323 a\u0323\u0302 \u1ea5 \u0041\u030a Å Å
\u0344 \u0958 \u0f73 \u0f75 \u0f81 \u1d15e\u1d165 \u2adc
\u110b\u1175\u1100\u1173\u11af 이글 각\u11a8 \u1100\u1161 가\u11a7 가\u11a8 \uac00\u11c2
が か\u3099 ハ\u309a バ ｶﾞ
नमस्ते दुनिया क्षेत्र क़
สวัสดีชาวโลก น้ำ กำ
مرحبا بالعالم لا ١٢٣ ﷺ
שלום עולם שָׁלוֹם \ufb2a
你好，世界！ 一二三 ３ ⅷ Ⅷ ½ ² ③ 𝟙 ৪
Привет, мир! Ёлка ЙОД и\u0306
Ωραίος Ἀθῆναι ᾳ ᾼ Ω\u0345
😀 👩‍👩‍👧‍👦 👍🏽 🇩🇪 ❤️ ☃ 1️⃣ 🏴󠁧󠁢󠁥󠁮󠁧󠁿
a\u00a0b\u2003c\u3000d\u1680e\u2028f\u2029g\u205fh\u202fi\u0085j
a\u200bb\u200cc\u200dd\ufeffe\u2060f\u180eg\u00adh
tab\there\r\nnew\x0bline\x0cpage   many    spaces
\x01\x02\x1c\x1d\x1e\x1f \x7f \x80\x9f
“curly” ‘quotes’ it’s — dash – … &amp; &lt;b&gt;
ＦＵＬＬ ｗｉｄｔｈ ①②
x\u0338 <\u0338 >\u0338 =\u0338 <|endoftext|>\u0338 !\u0338
\u0301 \u0301\u0327 a\u0327\u0301 a\u0301\u0327 \u0315\u0300\u05ae\u0300
\ue000 \U000f0000 \ufdd0 \uffff \ufffd \U0010ffff
a_b __init__ C++ c# 3.14 1,000,000 $5 50% e-mail@example.com https://example.com/a?b=c&d
(masterpiece:1.2), [best quality], {a|b|c}, ((very detailed)) \\(escaped\\)
aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa
thethethethethethetheththeinginginganananandandand
ðŁĺĤ Ġ Ċ ÄŁ \u0143 \u0120
"""

SCRIPTS = {  # name: ranges of code points
    "latin": [(0x41, 0x5A), (0x61, 0x7A)],
    "latin with marks": [(0xC0, 0x24F), (0x1E00, 0x1EFF)],
    "greek": [(0x370, 0x3FF), (0x1F00, 0x1FFF)],
    "cyrillic": [(0x400, 0x52F)],
    "armenian, georgian": [(0x531, 0x587), (0x10A0, 0x10FF), (0x1C90, 0x1CBF)],
    "hebrew": [(0x591, 0x5F4), (0xFB1D, 0xFB4F)],
    "arabic": [(0x600, 0x6FF), (0xFE70, 0xFEFC)],
    "devanagari, bengali": [(0x900, 0x9FF)],
    "other indic": [(0xA00, 0xDF4)],
    "thai, lao, tibetan": [(0xE01, 0xFDA)],
    "ethiopic, cherokee": [(0x1200, 0x13FD), (0xAB70, 0xABBF)],
    "han": [(0x4E00, 0x9FFF), (0x3400, 0x34FF), (0x20000, 0x200FF), (0xF900, 0xFAD9)],
    "kana": [(0x3041, 0x30FF), (0xFF66, 0xFF9F)],
    "hangul": [(0xAC00, 0xD7A3)],
    "jamo": [(0x1100, 0x11FF), (0xAC00, 0xAC40)],
    "marks": [(0x300, 0x36F), (0x591, 0x5BD), (0x64B, 0x65F), (0x1AB0, 0x1AC0), (0x20D0, 0x20F0)],
    "numbers": [(0x30, 0x39), (0xB2, 0xB3), (0xBC, 0xBE), (0x660, 0x669), (0x2160, 0x2188),
                (0x2460, 0x24FF), (0x1D7CE, 0x1D7FF)],
    "symbols": [(0x21, 0x2F), (0x3A, 0x40), (0x5B, 0x60), (0x7B, 0x7E), (0xA1, 0xBF),
                (0x2010, 0x205E), (0x20A0, 0x20C0), (0x2100, 0x2BFF), (0x3001, 0x303F)],
    "emoji": [(0x1F300, 0x1FAFF), (0x2600, 0x27BF), (0x1F1E6, 0x1F1FF), (0x200D, 0x200D),
              (0xFE0F, 0xFE0F), (0x1F3FB, 0x1F3FF)],
    "spaces, controls": [(0x1, 0x20), (0x7F, 0xA0), (0x2000, 0x200F), (0x2028, 0x202F),
                         (0x205F, 0x2064), (0x3000, 0x3000), (0xFEFF, 0xFEFF)],
    "mathematical, old": [(0x1D400, 0x1D7FF), (0x10000, 0x10FFF), (0x11000, 0x11FFF),
                          (0x16E40, 0x16E7F), (0x1E900, 0x1E95F)],
    "anything": [(0x1, 0xD7FF), (0xE000, 0x1FFFF)],
}  # fmt: skip
PIECES = ["'s", "'T", "'re", "'VE", "'m", "'LL", "'d", "'", "!", "!!", "<|startoftext|>",
          "<|endoftext|>", "<|EndOfText|>", "<|STARTOFTEXT|>", "<Cat-Toy>", "<cat-toy>_1",
          "</w>", "<|", "|>", "\u0130", "\u03a3", "\u200d", "\ufe0f"]  # fmt: skip


SPACES = [" ", " ", " ", " ", " ", " ", "", "", "  ", "\n", "\u00a0", ", "]


def is_known(point):
    """Whether it is a mark to `tokenizers` as well: its NFC has older tables, in which the marks of
    Unicode 10 to 15 are none, so that it does not sort them."""
    return all(
        NFC.normalize_str(text) == unicodedata.normalize("NFC", text)
        for mark in "\u0334\u0327\u0301"
        for text in (point, point + mark, mark + point, "a" + point)
    )


def runs(points):
    """[first, last] of consecutive ones."""
    found = []
    for point in sorted(points):
        if found and found[-1][1] == point - 1:
            found[-1][1] = point
        else:
            found.append([point, point])
    return found


def make_alphabet():
    """What texts are drawn from, and what is left out."""
    scripts, left_out = [], set()
    for ranges in SCRIPTS.values():
        points = {p for first, last in ranges for p in range(first, last + 1)
                  if unicodedata.category(chr(p)) not in ("Cn", "Cs")}  # fmt: skip
        known = {p for p in points if is_known(chr(p))}
        scripts.append(runs(known))
        left_out |= points - known
    return {"scripts": scripts, "pieces": PIECES, "spaces": SPACES, "left_out": runs(left_out)}


def draw_texts(alphabet):
    """The texts, as Corpus in clip_tokenizer_test.cc draws them."""
    state = 1

    def one_of(choices):
        nonlocal state
        state = (state * 6364136223846793005 + 1442695040888963407) % 2**64
        return choices[(state >> 33) % len(choices)]

    scripts = [[chr(p) for first, last in ranges for p in range(first, last + 1)]
               for ranges in alphabet["scripts"]]  # fmt: skip
    vocabulary = json.loads((TEXT / "clip" / "vocab.json").read_text(encoding="utf-8"))
    words = sorted(w[:-4] for w in vocabulary if w.endswith("</w>") and w.isascii())
    for _ in range(COUNT):
        two = [one_of(scripts), one_of(scripts)]
        size = 100 if one_of(range(50)) == 0 else 1 + one_of(range(7))
        text = ""
        for _ in range(size):
            kind = one_of(range(8))
            if kind < 2:
                text += one_of(words)
            elif kind == 2:
                text += one_of(words).upper()
            elif kind == 3:
                text += one_of(alphabet["pieces"])
            else:
                letters = one_of(two)
                for _ in range(1 + one_of(range(6))):
                    text += one_of(letters)
            text += one_of(alphabet["spaces"])
        yield text


def hash_of(lists):
    """FNV-1a over whole numbers instead of bytes; the length goes before each list."""
    value = 0xCBF29CE484222325
    for numbers in lists:
        for number in (len(numbers), *numbers):
            value = (value ^ number) * 0x100000001B3 % 2**64
    return f"{value:016x}"


def ids_of(tokenizer, texts):
    return [ids[1:-1] for ids in tokenizer(texts, verbose=False).input_ids]


def make_corpus(alphabet, tokenizers):
    texts = list(draw_texts(alphabet))
    blocks = [texts[i : i + BLOCK] for i in range(0, COUNT, BLOCK)]
    hashes = {"texts": [hash_of([text.encode() for text in block]) for block in blocks]}
    hashes |= {kind: [hash_of(ids_of(t, block)) for block in blocks]
               for kind, t in tokenizers.items()}  # fmt: skip
    rows = [f"{json.dumps(key)}:{json.dumps(value, separators=(',', ':'))}"
            for key, value in {**alphabet, "hashes": hashes}.items()]  # fmt: skip
    (TEXT / "corpus.json").write_text("{" + ",\n".join(rows) + "}\n", encoding="utf-8")
    print(f"{COUNT} texts; left out are {sum(b - a + 1 for a, b in alphabet['left_out'])} code points")


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--first", type=int, help="goldens of other texts alone")
    parser.add_argument("--output", type=Path, default=TEXT / "goldens.json")
    args = parser.parse_args()
    if transformers.__version__ != VERSION:
        raise SystemExit(f"transformers is {transformers.__version__}, not {VERSION}")
    if unicodedata.unidata_version != "15.0.0":
        raise SystemExit(f"these tables are of Unicode {unicodedata.unidata_version}, not 15.0.0")
    tokenizers = {kind: CLIPTokenizer.from_pretrained(TEXT / kind) for kind in KINDS}
    alphabet = make_alphabet()
    if args.first is None:
        make_corpus(alphabet, tokenizers)
    lines = BY_HAND.strip("\n").split("\n")
    by_hand = [line.encode("ascii", "backslashreplace").decode("unicode_escape")
               if "\\u" in line or "\\x" in line or "\\U" in line or "\\t" in line else line
               for line in lines]  # fmt: skip
    first = args.first or 0
    texts = ["", " ", "\n", *by_hand, *list(draw_texts(alphabet))[first : first + BLOCK]]
    ids = {kind: ids_of(t, texts) for kind, t in tokenizers.items()}
    rows = []
    for i, text in enumerate(texts):
        row = {"text": text, "sd1": ids["sd1"][i]}
        row |= {kind: ids[kind][i] for kind in KINDS[1:] if ids[kind][i] != row["sd1"]}
        if len(row["sd1"]) > 75:
            row["cut_off"] = tokenizers["sd1"].decode(
                row["sd1"][75:], clean_up_tokenization_spaces=False)  # fmt: skip
        rows.append(json.dumps(row, ensure_ascii=False, separators=(",", ":")))
    args.output.write_text(
        f'{{"transformers":"{VERSION}","texts":[\n' + ",\n".join(rows) + "\n]}\n", encoding="utf-8")
    print(f"{len(rows)} texts, {args.output.stat().st_size} bytes")


if __name__ == "__main__":
    main()
