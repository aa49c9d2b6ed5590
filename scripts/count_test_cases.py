# SPDX-License-Identifier: Apache-2.0
"""Sums up test results: scripts/count_test_cases.py <folder>. Prints failed cases by name, how many
were skipped for each reason and, on the last line, "N passed, N failed, N skipped"; the exit status is
1 when one failed or none ran, or when a case needs a GPU and scripts/test-gpu would not find it.

The folder holds ctest's JUnit files, one entry per test program, and in cases/ what GoogleTest
programs wrote: cases/<program>.xml. A program without such a file counts as one case; what Python's
unittest skipped in it counts as skipped besides, and it is not passed when that was all. again/ holds the
same of programs that ran again because they had failed. One that then passed is named, and counts as it did
then, unless the first run crashed or a sanitizer reported something."""

import ast
import collections
import fnmatch
import pathlib
import re
import sys
import xml.etree.ElementTree as xml

import gpu_record


def read_cases(path):
    """(passed, names of failed cases, {name of a skipped case: why}) of a GoogleTest program."""
    passed, failed, skipped = 0, [], {}
    for case in xml.parse(path).getroot().iter("testcase"):
        name, skip = f"{case.get('classname')}.{case.get('name')}", case.find("skipped")
        if case.find("failure") is not None:
            failed.append(name)
        elif skip is not None:  # the message's first line is the place in the source
            skipped[name] = (skip.get("message", "").strip().splitlines() or ["no reason"])[-1]
        elif case.get("status") == "run":
            passed += 1
        else:
            skipped[name] = "disabled"
    return passed, failed, skipped


def test_gpu_finds(program, case):
    wanted, _, unwanted = gpu_record.GPU_CASES.partition("-")

    def among(patterns):
        return any(fnmatch.fnmatchcase(case, pattern) for pattern in patterns.split(":"))

    return program in gpu_record.GPU_PROGRAMS and among(wanted) and not among(unwanted)


def skipped_itself(program):
    """The test has a SKIP_ property in CMake and met it."""
    skip = program.find("skipped")
    return skip is not None and skip.get("message", "").startswith("SKIP_")


def skipped_by_unittest(program):
    """(whether any case ran, {why a case was skipped: how often}) of a program's output. unittest tells why
    with verbosity=2."""
    output = program.findtext("system-out") or ""
    reasons = collections.Counter()
    summary = re.search(r"^Ran (\d+) tests? in [^\n]*\n\n[A-Z ]+ \(.*?skipped=(\d+).*\)$", output, re.MULTILINE)
    if not summary:
        return True, reasons
    ran, skipped = map(int, summary.groups())
    for quoted in re.findall(r"^(?:.* \.\.\. )?skipped ('.*'|\".*\")$", output, re.MULTILINE):
        reasons[ast.literal_eval(quoted)] += 1
    if reasons.total() < skipped:
        reasons[f"{program.get('name')} does not tell why"] = skipped - reasons.total()
    return ran > skipped, reasons


def programs_in(file):
    return xml.parse(file).getroot().iter("testcase") if file.exists() else []


def only_expected_something_else(program, cases):
    """A failed run neither crashed nor had a sanitizer's report. `cases`: of a GoogleTest program, which
    writes them at its end."""
    output = program.findtext("system-out") or ""
    reported = "Sanitizer" in output or "runtime error:" in output
    return not reported and (cases.exists() or "[ RUN " not in output)


def main(folder):
    passed, failed, reasons = 0, [], collections.Counter()
    passed_again = {program.get("name"): program for program in programs_in(folder / "again" / "ctest.xml")
                    if program.get("status") == "run"}
    for file in sorted(folder.glob("*.xml")):
        for program in programs_in(file):
            name, status, ran = program.get("name"), program.get("status"), program
            cases = folder / "cases" / f"{name}.xml"
            if (status == "fail" and name in passed_again and
                    only_expected_something_else(program, cases)):
                print(f"again: {name} failed beside other tests and passed alone; see its first run above")
                status, cases = "run", folder / "again" / "cases" / f"{name}.xml"
                ran = passed_again[name]
            if cases.exists():
                case_passed, case_failed, case_skipped = read_cases(cases)
                passed += case_passed
                reasons.update(case_skipped.values())
                failed += [f"{name}: {case} needs a GPU, and scripts/test-gpu does not run it: see "
                           "GPU_CASES in scripts/gpu_record.py"
                           for case, reason in case_skipped.items()
                           if gpu_record.NEEDS_GPU in reason and not test_gpu_finds(name, case)]
                failed += [f"{name}: {case}" for case in case_failed]
                # The program failed after its cases: it crashed, leaked or timed out.
                if status == "fail" and not case_failed:
                    failed.append(name)
            elif status == "run":
                any_ran, unittest_skipped = skipped_by_unittest(ran)
                passed += any_ran
                reasons.update(unittest_skipped)
            elif status == "disabled" or skipped_itself(program):
                reasons[f"{name}: disabled" if status == "disabled" else name] += 1
            else:  # also a program that could not be started
                failed.append(name)
    for reason, count in sorted(reasons.items()):
        print(f"skipped: {count} × {reason}")
    for name in failed:
        print(f"FAILED: {name}")
    print(f"{passed} passed, {len(failed)} failed, {reasons.total()} skipped")
    return 1 if failed or not passed else 0


if __name__ == "__main__":
    sys.exit(main(pathlib.Path(sys.argv[1])))
