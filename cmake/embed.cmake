# SPDX-License-Identifier: Apache-2.0
# Writes the files of a directory into a C++ source, as denoised::PageFiles() of
# server/http/page_files.h. A script, so that it runs when a file has changed:
#   cmake -DDIRECTORY=server/http/page -DOUTPUT=page_files.cc -P cmake/embed.cmake
set(types
  html text/html css text/css js text/javascript svg image/svg+xml png image/png ico image/x-icon
  webmanifest application/manifest+json)

file(GLOB files RELATIVE ${DIRECTORY} "${DIRECTORY}/*")
set(arrays "")
set(entries "")
set(number 0)
foreach(name IN LISTS files)
  string(REGEX MATCH "[^.]+$" extension "${name}")
  list(FIND types "${extension}" index)
  if(index EQUAL -1)
    message(FATAL_ERROR "${DIRECTORY}/${name}: no type is known for .${extension}; add it to cmake/embed.cmake")
  endif()
  math(EXPR index "${index} + 1")
  list(GET types ${index} type)
  if(type MATCHES "^text/")
    string(APPEND type "@charset@")  # without ';', which stands between the elements of a list
  endif()
  file(READ "${DIRECTORY}/${name}" bytes HEX)
  file(SHA256 "${DIRECTORY}/${name}" hash)
  string(SUBSTRING "${hash}" 0 16 hash)
  string(REGEX REPLACE "(..)" "\\\\x\\1" bytes "${bytes}")
  file(SIZE "${DIRECTORY}/${name}" size)
  set(path "/${name}")
  if(name STREQUAL "index.html")
    set(path "/")
  endif()
  string(APPEND arrays "constexpr char kFile${number}[] = \"${bytes}\";\n")
  string(APPEND entries "      {\"${path}\", \"${type}\", \"\\\"${hash}\\\"\", {kFile${number}, ${size}}},\n")
  math(EXPR number "${number} + 1")
endforeach()

string(REPLACE "@charset@" "; charset=utf-8" entries "${entries}")
file(WRITE "${OUTPUT}.new" "// Made by cmake/embed.cmake.
#include \"server/http/page_files.h\"

namespace denoised {
namespace {

${arrays}
}  // namespace

const std::vector<PageFile>& PageFiles() {
  static const auto* const files = new std::vector<PageFile>{
${entries}  };
  return *files;
}

}  // namespace denoised
")
file(RENAME "${OUTPUT}.new" "${OUTPUT}")
