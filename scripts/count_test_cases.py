"""Sums up test results: scripts/count_test_cases.py <folder>. Prints failed cases by name and, on the
last line, "N passed, N failed"; the exit status is 1 when one failed or none ran.

The folder holds ctest's JUnit files, one entry per test program, and in cases/ what GoogleTest
programs wrote: cases/<program>.xml. A program without such a file counts as one case."""

import pathlib
import sys
import xml.etree.ElementTree as xml


def read_cases(path):
    """(passed, names of failed cases) of a GoogleTest program."""
    passed, failed = 0, []
    for case in xml.parse(path).getroot().iter("testcase"):
        if case.find("failure") is not None:
            failed.append(f"{case.get('classname')}.{case.get('name')}")
        elif case.get("status") == "run" and case.find("skipped") is None:
            passed += 1
    return passed, failed


def skipped_itself(program):
    """The test has a SKIP_ property in CMake and met it."""
    skip = program.find("skipped")
    return skip is not None and skip.get("message", "").startswith("SKIP_")


def main(folder):
    passed, failed, skipped = 0, [], []
    for file in sorted(folder.glob("*.xml")):
        for program in xml.parse(file).getroot().iter("testcase"):
            name, status = program.get("name"), program.get("status")
            cases = folder / "cases" / f"{name}.xml"
            if cases.exists():
                case_passed, case_failed = read_cases(cases)
                passed += case_passed
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
    print(f"{passed} passed, {len(failed)} failed")
    return 1 if failed or not passed else 0


if __name__ == "__main__":
    sys.exit(main(pathlib.Path(sys.argv[1])))
