# SPDX-License-Identifier: Apache-2.0
"""Sums up test results: scripts/count_test_cases.py <folder>. Prints failed cases by name, how many
were skipped because they need a GPU and, on the last line, "N passed, N failed"; the exit status is 1
when one failed or none ran, or when a case needs a GPU and scripts/test-gpu would not find it.

The folder holds ctest's JUnit files, one entry per test program, and in cases/ what GoogleTest
programs wrote: cases/<program>.xml. A program without such a file counts as one case."""

import fnmatch
import pathlib
import sys
import xml.etree.ElementTree as xml

import gpu_record


def read_cases(path):
    """(passed, names of failed cases, names of those that need a GPU) of a GoogleTest program."""
    passed, failed, need_gpu = 0, [], []
    for case in xml.parse(path).getroot().iter("testcase"):
        name, skip = f"{case.get('classname')}.{case.get('name')}", case.find("skipped")
        if case.find("failure") is not None:
            failed.append(name)
        elif skip is not None and gpu_record.NEEDS_GPU in skip.get("message", ""):
            need_gpu.append(name)
        elif case.get("status") == "run" and skip is None:
            passed += 1
    return passed, failed, need_gpu


def test_gpu_finds(program, case):
    return program in gpu_record.GPU_PROGRAMS and any(
        fnmatch.fnmatchcase(case, pattern) for pattern in gpu_record.GPU_CASES.split(":"))


def skipped_itself(program):
    """The test has a SKIP_ property in CMake and met it."""
    skip = program.find("skipped")
    return skip is not None and skip.get("message", "").startswith("SKIP_")


def main(folder):
    passed, failed, skipped, need_gpu = 0, [], [], 0
    for file in sorted(folder.glob("*.xml")):
        for program in xml.parse(file).getroot().iter("testcase"):
            name, status = program.get("name"), program.get("status")
            cases = folder / "cases" / f"{name}.xml"
            if cases.exists():
                case_passed, case_failed, case_need_gpu = read_cases(cases)
                passed += case_passed
                need_gpu += len(case_need_gpu)
                failed += [f"{name}: {case} needs a GPU, and scripts/test-gpu does not run it: see "
                           "GPU_CASES in scripts/gpu_record.py" for case in case_need_gpu
                           if not test_gpu_finds(name, case)]
                failed += [f"{name}: {case}" for case in case_failed]
                # The program failed after its cases: it crashed, leaked or timed out.
                if status == "fail" and not case_failed:
                    failed.append(name)
            elif status == "run":
                passed += 1
            elif status == "disabled" or skipped_itself(program):
                skipped.append(name)
            else:  # also a program that could not be started
                failed.append(name)
    for name in skipped:
        print(f"skipped: {name}")
    for name in failed:
        print(f"FAILED: {name}")
    if need_gpu:
        print(f"{need_gpu} cases were skipped: they need a GPU")
    print(f"{passed} passed, {len(failed)} failed")
    return 1 if failed or not passed else 0


if __name__ == "__main__":
    sys.exit(main(pathlib.Path(sys.argv[1])))
