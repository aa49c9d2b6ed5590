# SPDX-License-Identifier: Apache-2.0
# Installs the client to a fresh prefix, builds the example and a test there against nothing but the
# installed package, and runs both: cmake -D... -P installed_package_test.cmake
cmake_minimum_required(VERSION 3.25)
function(run)
  execute_process(COMMAND ${ARGV} RESULT_VARIABLE result OUTPUT_VARIABLE output ERROR_VARIABLE output
                  WORKING_DIRECTORY ${WORK})
  message(STATUS "${ARGV}\n${output}")
  if(NOT result EQUAL 0)
    message(FATAL_ERROR "exit code ${result}")
  endif()
  set(output "${output}" PARENT_SCOPE)
endfunction()

# Configures with the arguments after `source` and builds into ${source}-build.
function(build source)
  run(${CMAKE_COMMAND} -S ${WORK}/${source} -B ${WORK}/${source}-build -G ${GENERATOR}
      -DCMAKE_PREFIX_PATH=${WORK}/prefix -DCMAKE_BUILD_TYPE=Release
      -DCMAKE_CXX_COMPILER=${COMPILER} -DCMAKE_CXX_FLAGS=${FLAGS} ${ARGN})
  run(${CMAKE_COMMAND} --build ${WORK}/${source}-build)
endfunction()

file(REMOVE_RECURSE ${WORK})
file(MAKE_DIRECTORY ${WORK})
run(${CMAKE_COMMAND} --install ${BINARY_DIR} --component client --prefix ${WORK}/prefix)
file(COPY ${SOURCE_DIR}/client/example DESTINATION ${WORK})  # away from the headers of the source
build(example "-DCMAKE_CXX_FLAGS=${FLAGS} -Wall -Wextra -Werror")  # as programs of others have them
run(${FAKE_SERVER} ${WORK}/example-build/draw_digits {server})
if(NOT output MATCHES "12/12")
  message(FATAL_ERROR "the example printed no progress")
endif()
foreach(index 0 1 2)
  file(READ ${WORK}/digit-${index}.png magic LIMIT 8 HEX)
  if(NOT magic STREQUAL 89504e470d0a1a0a)
    message(FATAL_ERROR "digit-${index}.png is no PNG")
  endif()
endforeach()
run(${WORK}/prefix/bin/denoise --version)

file(COPY ${SOURCE_DIR}/tests/client/installed DESTINATION ${WORK})
foreach(neighbours STATIC SHARED)
  build(installed -DNEIGHBOURS=${neighbours})
  run(${FAKE_SERVER} ${WORK}/installed-build/installed_client_test {server})
endforeach()

file(STRINGS ${SOURCE_DIR}/client/example/draw_digits.cc lines)
list(LENGTH lines count)
if(count GREATER_EQUAL 40)
  message(FATAL_ERROR "the example has ${count} lines; it promises fewer than 40")
endif()
