#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""scripts/test-gpu, scripts/gpu_record.py, scripts/count_test_cases.py and .ci/run, on programs that
behave like GoogleTest's and a GPU that is a script. Run: tests/gpu_record_test.py"""

import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import unittest
from xml.sax.saxutils import escape

ROOT = pathlib.Path(__file__).resolve().parent.parent
SCRIPTS = ["test-gpu", "gpu_record.py", "count_test_cases.py"]
sys.path.insert(0, str(ROOT / "scripts"))

import gpu_record  # noqa: E402

# One case passes in each program, and all of the trainer's.
PROGRAMS = len(gpu_record.GPU_PROGRAMS) + sum(map(len, gpu_record.TRAINER_CASES.values()))

# Cases and what becomes of them; with "crash" the program ends before it writes its report.
PROGRAM = """#!{python}
import fnmatch, os, sys, time
flags = dict(flag.split("=", 1) for flag in sys.argv[1:] if "=" in flag)
wanted, _, unwanted = flags["--gtest_filter"].partition("-")
def among(name, patterns): return any(fnmatch.fnmatchcase(name, each) for each in patterns.split(":"))
cases = {{name: what for name, what in {cases}.items() if among(name, wanted) and not among(name, unwanted)}}
def note(what):
    with open("ran", "a") as file: file.write(what + "\\n")
if "--gtest_list_tests" in sys.argv:
    print("Running main() from gmock_main.cc")
    for name in cases:
        suite, case = name.split(".")
        print(suite + ".\\n  " + case + "  # GetParam() = 1")
    sys.exit()
count, index = int(os.environ["GTEST_TOTAL_SHARDS"]), int(os.environ["GTEST_SHARD_INDEX"])
mine = list(cases)[index::count]
report = ""
for name in mine:
    print("[ RUN      ] " + name, flush=True)
    note(name)
    if "Slow" in name: time.sleep(0.1)
    if cases[name] == "crash": sys.exit(11)
    if cases[name] == "hang": time.sleep(600)
    suite, case = name.split(".")
    inner = dict(passed="", disabled="", failed="<failure/>",
                 skipped='<skipped message="a_test.cc:1&#x0A;needs a GPU beside another"/>')[cases[name]]
    status = "notrun" if cases[name] == "disabled" else "run"
    report += f'<testcase classname="{{suite}}" name="{{case}}" status="{{status}}">{{inner}}</testcase>'
    note(name)
with open(flags["--gtest_output"].removeprefix("xml:"), "w") as out:
    out.write("<testsuites>" + report + "</testsuites>")
sys.exit("failed" in [cases[name] for name in mine])
"""
SANITIZER = """#!{python}
import subprocess, sys
at = sys.argv.index("--error-exitcode")
command = [each for each in sys.argv[at + 2:] if not each.startswith("--report")]
ran = subprocess.run(command, stdout=subprocess.PIPE, text=True)
status, bad = ran.returncode, "Bad" in ran.stdout
print("========= COMPUTE-SANITIZER\\n========= Invalid __global__ write" if bad else "")
sys.exit(int(sys.argv[at + 1]) if bad else status)
"""


class GpuRecordTest(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.root = pathlib.Path(folder.name)
        (self.root / "scripts").mkdir()
        for name in SCRIPTS:
            shutil.copy(ROOT / "scripts" / name, self.root / "scripts" / name)
        for file in ["cmake/cuda.cmake", "engine/core/arena.cc", "engine/nn/conv.cc",
                     "engine/backend/cuda/conv2d.cu", "engine/backend/cpu/conv.cc",
                     "engine/training/cpu/conv.cc"]:
            self.write(file, file)
        self.script("bin/nvidia-smi", "#!/bin/sh\necho 'NVIDIA H200, 580.1'\n")
        self.script("bin/compute-sanitizer", SANITIZER.format(python=sys.executable))
        for name in gpu_record.GPU_PROGRAMS:
            self.program(name, {"Cuda/Fine.Case/Bf16": "passed"})
        self.script("build/cuda/trainer/denoise-train", "")
        for name in gpu_record.TRAINER_CASES:
            self.trainer_test(name, "pass")

    def write(self, name, text):
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path

    def script(self, name, text):
        self.write(name, text).chmod(0o755)

    def program(self, name, cases):
        self.script(f"build/cuda/tests/{name.removesuffix('_test').split('_')[0]}/{name}",
                    PROGRAM.format(python=sys.executable, cases=cases))

    def trainer_test(self, name, body):
        """A test like those of tests/trainer/, whose cases do this."""
        cases = [case.split(".") for case in gpu_record.TRAINER_CASES[name]]
        self.write(f"tests/trainer/{name}.py", "import os, sys, unittest\n"
                   f"class {cases[0][0]}(unittest.TestCase):\n" +
                   "".join(f"    def {case}(self): {body}\n" for _, case in cases) +
                   "program = sys.argv.pop(1)\nunittest.main(verbosity=2)\n")

    def run_test_gpu(self, *arguments, status=0):
        environment = {**os.environ, "PATH": f"{self.root / 'bin'}:{os.environ['PATH']}",
                       "DENOISED_COMMIT": "abc123"}
        ran = subprocess.run([sys.executable, "scripts/test-gpu", "--no-build", "--jobs=2",
                              *arguments], cwd=self.root, env=environment, text=True,
                             capture_output=True)
        self.assertEqual(ran.returncode, status, ran.stdout + ran.stderr)
        self.output = ran.stdout + ran.stderr
        return gpu_record.read(self.root / gpu_record.RECORD)

    def test_records_what_ran(self):
        self.program("backend_test", {f"Cuda/Fine.Case/{i}": "passed" for i in range(20)} |
                     {"Cuda/Two.Gpus/0": "skipped"})
        record = self.run_test_gpu(f"--keep={self.root / 'logs'}")
        self.assertIn("[ RUN      ] Cuda/Fine.Case/19", (self.root / "logs/test-gpu.log").read_text())
        self.assertEqual(record["passed"], PROGRAMS + 19)
        self.assertEqual(record["failed"], [])
        self.assertEqual(record["skipped"], {"backend_test: Cuda/Two.Gpus/0": "needs a GPU beside another"})
        self.assertEqual((record["device"], record["driver"], record["commit"]),
                         ("NVIDIA H200", "580.1", "abc123"))
        self.assertEqual(record["sources"], gpu_record.hash_of_sources(self.root))
        self.assertTrue(self.output.endswith(f"{PROGRAMS + 19} passed, 0 failed, 1 skipped\n"), self.output)

    def test_what_failed_runs_again(self):
        self.program("backend_test", {"Cuda/Fine.Case/0": "passed", "Cuda/Bad.Case/0": "failed"})
        self.program("engine_test", {"Cuda/Fine.Case/Bf16": "passed", "Device/EngineTest.Gpu/cuda": "crash"})
        first = self.run_test_gpu(status=1)
        failed = ["backend_test: Cuda/Bad.Case/0", "engine_test: Device/EngineTest.Gpu/cuda"]
        self.assertEqual(first["failed"][:2], [failed[0], failed[1] + ": did not run"])
        (self.root / "ran").unlink()
        self.program("backend_test", {"Cuda/Fine.Case/0": "passed", "Cuda/Bad.Case/0": "passed"})
        self.assertEqual(self.run_test_gpu("--again", status=1)["failed"][0], failed[1] + ": did not run")
        self.program("engine_test", {"Cuda/Fine.Case/Bf16": "passed", "Device/EngineTest.Gpu/cuda": "passed"})
        record = self.run_test_gpu("--again")
        self.assertEqual((record["passed"], record["failed"], record["again"]),
                         (first["passed"] + 2, [], failed))
        self.assertFalse([case for case in (self.root / "ran").read_text().split() if "Fine" in case])
        self.assertIn("2 of them in a second run", gpu_record.describe(record, record["sources"]))
        self.run_test_gpu("--again", status=1)
        self.assertIn("nothing failed", self.output)
        self.write("engine/nn/conv.cc", "changed")
        self.run_test_gpu("--again", status=1)
        self.assertIn("is no record of these sources", self.output)

    def test_what_measures_time_or_memory_runs_alone(self):
        alone = ["Cuda/Slow.TakesNoMoreMemory/0", "Device/EngineTest.Slow/cuda", "SeveralDevices.SlowGpu"]
        self.program("backend_test", {f"Cuda/Slow.Case/{i}": "passed" for i in range(6)} | {alone[0]: "passed"})
        self.program("engine_test", {"Cuda/Slow.Case/Bf16": "passed"} | dict.fromkeys(alone[1:], "passed"))
        record = self.run_test_gpu()
        self.assertEqual((record["passed"], record["failed"]), (PROGRAMS - 2 + 10, []))
        ran = (self.root / "ran").read_text().splitlines()
        for case in alone:  # began and ended once, with nothing between
            self.assertEqual([i for i, name in enumerate(ran) if name == case],
                             [ran.index(case), ran.index(case) + 1], ran)
        self.assertGreater(ran.index(alone[0]), max(i for i, name in enumerate(ran) if name not in alone))
        # A suite that was renamed would run beside others.
        sources = "".join(file.read_text() for file in (ROOT / "tests").glob("*/*_test.cc"))
        patterns = re.search(r"ALONE_CASES = (\[.*\])", (ROOT / "scripts/test-gpu").read_text())[1]
        for pattern in json.loads(patterns):
            self.assertIn(pattern.split(".")[0].split("/")[-1].strip("*"), sources)

    def test_the_trainer_runs_on_the_gpu(self):
        case = gpu_record.TRAINER_CASES["text_to_image_test"][0]
        name = f"trainer_text_to_image_test: {case}"
        self.trainer_test("text_to_image_test", "self.assertIn(program[-20:] + os.environ['DENOISE_TRAIN_DEVICE'], "
                          "'/trainer/denoise-traincuda')")
        self.assertEqual(self.run_test_gpu()["failed"], [])
        self.trainer_test("text_to_image_test", f"self.assertNotIn('{case.split('.')[1]}', str(self))")
        self.assertEqual(self.run_test_gpu(status=1)["failed"], [name])
        self.trainer_test("text_to_image_test", "self.skipTest('it is away')")
        self.assertIn(name, self.run_test_gpu()["skipped"])
        # A case that was renamed has not passed.
        self.trainer_test("text_to_image_test", "pass")
        file = self.root / "tests/trainer/text_to_image_test.py"
        file.write_text(file.read_text().replace(case.split(".")[1], "test_other"))
        self.assertEqual(self.run_test_gpu(status=1)["failed"], [name])
        for test, cases in gpu_record.TRAINER_CASES.items():
            text = (ROOT / f"tests/trainer/{test}.py").read_text()
            for each in cases:
                self.assertIn(f"def {each.split('.')[1]}(self)", text)

    def test_shards_take_gpus_in_turn(self):
        self.script("bin/nvidia-smi", "#!/bin/sh\necho 'NVIDIA H200, 580.1'\necho 'NVIDIA H200, 580.1'\n")
        self.program("backend_test", {f"Cuda/Fine.Case/{i}": "passed" for i in range(4)} |
                     {"Cuda/Slow.TakesNoMoreMemory/0": "passed"})
        program = self.root / "build/cuda/tests/backend/backend_test"
        program.write_text(program.read_text().replace(
            "mine = ", "note('gpu ' + os.environ.get('CUDA_VISIBLE_DEVICES', 'all'))\nmine = "))
        self.run_test_gpu()
        ran = (self.root / "ran").read_text().splitlines()
        self.assertEqual(sorted(line for line in ran if line.startswith("gpu")),
                         ["gpu 0", "gpu 0", "gpu 1", "gpu 1", "gpu all"])

    def test_disabled_cases_did_not_pass(self):
        self.program("backend_test", {"Cuda/Fine.Case/0": "passed", "Cuda/Off.DISABLED_Case/0": "disabled"})
        record = self.run_test_gpu()
        self.assertEqual(record["passed"], PROGRAMS)
        self.assertEqual(record["skipped"], {"backend_test: Cuda/Off.DISABLED_Case/0": "disabled"})

    def test_a_failure_a_crash_and_a_hang_are_failures(self):
        self.program("models_test", {"Cuda/Bad.Case/0": "failed"})
        self.assertEqual(self.run_test_gpu(status=1)["failed"], ["models_test: Cuda/Bad.Case/0"])
        self.program("models_test", {"Cuda/Lost.Case/0": "crash"})
        failed = self.run_test_gpu(status=1)["failed"]
        self.assertEqual(failed, ["models_test: Cuda/Lost.Case/0: did not run",
                                  "models_test-0 ended with 11 in Cuda/Lost.Case/0"])
        self.program("models_test", {"Cuda/Lost.Case/0": "hang"})
        for seconds in (3, 12, 48):  # in the first of which the programs are begun
            failed = self.run_test_gpu(f"--timeout={seconds}", status=1)["failed"]
            if "models_test-0 ended with the timeout in Cuda/Lost.Case/0" in failed:
                break
        self.assertIn("models_test-0 ended with the timeout in Cuda/Lost.Case/0", failed)

    def test_a_program_that_is_missing_is_an_error(self):
        shutil.rmtree(self.root / "build/cuda/tests/models")
        self.run_test_gpu(status=1)
        self.assertIn("models_test: no such program", self.output)

    def test_a_part_does_not_replace_the_whole(self):
        self.run_test_gpu("--filter=*Cuda*", status=2)
        self.assertIn("--out", self.output)

    def test_sanitizers_are_added_to_a_record_of_the_same_sources(self):
        self.run_test_gpu()
        record = self.run_test_gpu("--sanitize=memcheck", "--programs", "backend_test")
        self.assertEqual(record["passed"], PROGRAMS)
        self.assertEqual(record["sanitizers"]["memcheck"]["failed"], [])
        self.program("backend_test", {"Cuda/Bad.Write/0": "passed"})
        record = self.run_test_gpu("--sanitize=racecheck", "--programs", "backend_test", status=1)
        self.assertEqual(record["sanitizers"]["racecheck"]["failed"],
                         ["backend_test-0 ended with 86: Invalid __global__ write"])
        self.assertEqual(list(record["sanitizers"]), ["memcheck", "racecheck"])
        self.write("engine/backend/cuda/conv2d.cu", "changed")
        self.assertEqual(self.run_test_gpu()["sanitizers"], {})

    def test_a_sanitizer_is_added_to_the_record_that_out_names(self):
        before = self.run_test_gpu()
        other = self.root / "other.json"
        self.program("backend_test", {"Cuda/Fine.Case/0": "passed", "Cuda/Fine.Case/1": "passed"})
        self.run_test_gpu(f"--out={other}")
        record = self.run_test_gpu("--sanitize=memcheck", "--programs", "backend_test", f"--out={other}")
        self.assertEqual(record, before)
        self.assertEqual(gpu_record.read(other)["passed"], PROGRAMS + 1)
        self.assertEqual(list(gpu_record.read(other)["sanitizers"]), ["memcheck"])

    def test_the_hash_is_of_what_decides_results_on_a_gpu(self):
        before = gpu_record.hash_of_sources(self.root)
        for file in ["engine/backend/cpu/conv.cc", "engine/training/cpu/conv.cc",
                     "tests/models/__pycache__/made.pyc", "server/server.cc"]:
            self.write(file, "changed")
            self.assertEqual(gpu_record.hash_of_sources(self.root), before, file)
        for file in ["engine/backend/cuda/conv2d.cu", "engine/nn/conv.cc", "engine/models/new.cc",
                     "engine/engine.cc", "engine/batching/evaluator.cc", "engine/io/weights.cc",
                     "engine/pipelines/pipeline.cc", "engine/sampling/compile.cc",
                     "engine/text/clip_tokenizer.cc", "engine/training/cuda/gemm.cu",
                     "tests/backend/cuda_test.cc", "tests/batching/collector.h",
                     "tests/models/goldens/tiny/io.safetensors", "tests/models/new_test.cc",
                     "tests/engine/devices_test.cc", "tests/trainer/run_test.py",
                     "tests/needs_gpu.h"]:
            self.write(file, "changed")
            after = gpu_record.hash_of_sources(self.root)
            self.assertNotEqual(after, before, file)
            before = after

    def test_says_whether_the_record_is_of_these_sources(self):
        def expect(text, last_line):
            said = subprocess.check_output([sys.executable, self.root / "scripts/gpu_record.py"],
                                           text=True)
            self.assertIn(text, said)
            self.assertEqual(said.splitlines()[-1], last_line)

        stale = "0 passed, 0 failed, 1 skipped"
        expect("there is no docs/gpu-tests.json", stale)
        self.run_test_gpu()
        expect(f"is of these CUDA sources (NVIDIA H200 at abc123: {PROGRAMS} passed, 0 failed, 0 skipped",
               "1 passed, 0 failed, 0 skipped")
        self.write("engine/core/arena.cc", "changed")
        expect("is of other CUDA sources", stale)
        self.program("models_test", {"Cuda/Bad.Case/0": "failed"})
        self.run_test_gpu(status=1)
        expect(f"is of these CUDA sources (NVIDIA H200 at abc123: {PROGRAMS - 1} passed, 1 failed",
               "0 passed, 1 failed, 0 skipped")

    def test_a_record_of_other_sources_names_what_changed(self):
        def git(*arguments):
            return subprocess.run(["git", "-c", "user.name=a", "-c", "user.email=a@b", *arguments],
                                  cwd=self.root, capture_output=True, text=True, check=True).stdout

        git("init")
        git("add", ".")
        git("commit", "--message=first")
        commit = git("rev-parse", "HEAD").strip()
        self.assertEqual(gpu_record.changed_since(commit, self.root), [])
        for file in ["engine/core/arena.cc", "engine/backend/cpu/conv.cc", "scripts/gpu_record.py"]:
            self.write(file, "changed")
        (self.root / "engine/nn/conv.cc").unlink()
        self.assertEqual(gpu_record.changed_since(commit, self.root),
                         ["engine/core/arena.cc", "engine/nn/conv.cc"])
        self.assertEqual(gpu_record.changed_since("0" * 40, self.root), [])

    def count(self, program, case):
        results = self.root / "results"
        self.write("results/ctest.xml", f'<t><testcase name="{program}" status="run"/></t>')
        self.write(f"results/cases/{program}.xml",
                   '<t><testcase classname="Fine" name="Case" status="run"/>'
                   f'<testcase classname="Cuda/A" name="{case}" status="run">'
                   '<skipped message="a.cc:1&#x0A;needs a GPU"/></testcase>'
                   + "".join(f'<testcase classname="Fine" name="{name}" status="run">'
                             '<skipped message="a.cc:2&#x0A;needs two threads"/></testcase>'
                             for name in ["One", "Two"])
                   + '<testcase classname="Fine" name="DISABLED_Case" status="notrun"/></t>')
        return subprocess.run([sys.executable, self.root / "scripts/count_test_cases.py", results],
                              text=True, capture_output=True)

    def test_skipped_cases_are_counted(self):
        ran = self.count("backend_test", "Case/0")
        self.assertEqual((ran.returncode, ran.stdout), (
            0, "skipped: 1 × disabled\nskipped: 1 × needs a GPU\nskipped: 2 × needs two threads\n"
            "1 passed, 0 failed, 4 skipped\n"))

    def count_python(self, cases, verbosity=2):
        """Of a program of unittest with these cases, as ctest records what it printed."""
        shutil.rmtree(self.root / "results", ignore_errors=True)
        program = self.write("cases.py", "import sys, unittest\nclass Test(unittest.TestCase):\n" +
                             "".join(f"    def test_{name}(self): {body}\n" for name, body in cases.items()) +
                             f"unittest.main(verbosity={verbosity})\n")
        ran = subprocess.run([sys.executable, program], text=True, stdout=subprocess.PIPE,
                             stderr=subprocess.STDOUT)
        self.assertEqual(ran.returncode, 0, ran.stdout)
        self.write("results/ctest.xml", '<t><testcase name="page_test" status="run">'
                   f"<system-out>{escape(ran.stdout)}</system-out></testcase></t>")
        return subprocess.run([sys.executable, self.root / "scripts/count_test_cases.py",
                               self.root / "results"], text=True, capture_output=True)

    def test_cases_that_unittest_skipped_are_counted(self):
        a, b = "self.skipTest('there is no buf')", "self.skipTest('it\\'s \"away\"')"
        noise = "print('noise', file=sys.stderr)"
        for cases, verbosity, said in (
                ({"a": a, "b": b, "c": a, "d": noise}, 2,
                 "skipped: 1 × it's \"away\"\nskipped: 2 × there is no buf\n1 passed, 0 failed, 3 skipped\n"),
                ({"a": noise + "; " + a, "d": noise}, 2,
                 "skipped: 1 × there is no buf\n1 passed, 0 failed, 1 skipped\n"),
                ({"a": a, "b": b, "d": noise}, 1,
                 "skipped: 2 × page_test does not tell why\n1 passed, 0 failed, 2 skipped\n"),
                ({"d": noise}, 2, "1 passed, 0 failed, 0 skipped\n")):
            ran = self.count_python(cases, verbosity)
            self.assertEqual((ran.returncode, ran.stdout), (0, said), ran.stderr)

    def test_programs_that_may_skip_tell_why(self):
        skips = re.compile(r"\.skipTest\(|@unittest\.skip")
        tells = re.compile(r"unittest\.main\(.*verbosity=2")
        texts = {path: path.read_text(encoding="utf-8") for folder in ("tests", "client", "deploy")
                 for path in (ROOT / folder).rglob("*.py")}
        may_skip = {path for path, text in texts.items() if skips.search(text)} - {pathlib.Path(__file__).resolve()}
        self.assertGreater(len(may_skip), 5)
        self.assertEqual([path for path in may_skip if not tells.search(texts[path])], [])

    def test_a_program_whose_cases_were_all_skipped_did_not_pass(self):
        ran = self.count_python({"a": "self.skipTest('there is no buf')"})
        self.assertEqual((ran.returncode, ran.stdout), (
            1, "skipped: 1 × there is no buf\n0 passed, 0 failed, 1 skipped\n"), ran.stderr)

    def test_a_case_that_test_gpu_would_not_run_is_a_failure(self):
        ran = self.count("server_test", "Case/0")
        self.assertEqual(ran.returncode, 1)
        self.assertIn("FAILED: server_test: Cuda/A.Case/0 needs a GPU, and scripts/test-gpu",
                      ran.stdout)

    def test_the_last_lines_of_ci_name_what_it_left_out(self):
        (self.root / ".ci").mkdir()
        shutil.copy(ROOT / ".ci/run", self.root / ".ci/run")
        ran = subprocess.run(["bash", self.root / ".ci/run"], text=True, capture_output=True,
                             env={**os.environ, "SECONDS": "3700"})
        self.assertEqual((ran.returncode, ran.stderr), (1, ""))
        parts = re.findall(r"^== (.*)$", ran.stdout, re.MULTILINE)
        self.assertIn("scripts/test --asan, with clang and fuzzing", parts)
        last = ran.stdout.split("s  in all\n")[1].splitlines()
        self.assertEqual(last[-1], f"0 passed, 0 failed, {len(last) - 1} skipped")
        for name in parts:
            self.assertIn(f"skipped: {name}, because an hour is over", last)

    def count_again(self, output, failed_case=None, again="run"):
        """Of a program that failed with this output, in this case, and ran again."""
        shutil.rmtree(self.root / "results", ignore_errors=True)
        case = '<t><testcase classname="A" name="Case" status="run">{}</testcase></t>'
        self.write("results/ctest.xml", '<t><testcase name="server_test" status="fail">'
                   f"<system-out>{output}</system-out></testcase></t>")
        if failed_case:
            self.write("results/cases/server_test.xml", case.format("<failure/>"))
        self.write("results/again/ctest.xml", f'<t><testcase name="server_test" status="{again}"/></t>')
        self.write("results/again/cases/server_test.xml", case.format(""))
        return subprocess.run([sys.executable, self.root / "scripts/count_test_cases.py",
                               self.root / "results"], text=True, capture_output=True)

    def test_a_program_that_passes_again_is_named(self):
        for output, case in (("[ RUN      ] A.Case", "A.Case"), ("AssertionError: 3 != 4", None)):
            ran = self.count_again(output, case)
            self.assertEqual(ran.returncode, 0, ran.stdout)
            self.assertIn("again: server_test failed", ran.stdout)
            self.assertIn("1 passed, 0 failed", ran.stdout)

    def test_a_crash_or_a_report_is_not_excused(self):
        for output, case, again in (("[ RUN      ] A.Case", None, "run"),
                                    ("ERROR: AddressSanitizer: heap-use-after-free", None, "run"),
                                    ("[ RUN      ] A.Case", "A.Case", "fail")):
            ran = self.count_again(output, case, again)
            self.assertEqual(ran.returncode, 1, output)
            self.assertIn("FAILED: server_test", ran.stdout)


if __name__ == "__main__":
    unittest.main()
