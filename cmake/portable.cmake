# SPDX-License-Identifier: Apache-2.0
# DENOISED_PORTABLE: programs for machines without the distribution's gRPC. gRPC, protobuf, Abseil,
# OpenSSL and the image formats are linked from archives; what has none, such as oneDNN and
# prometheus-cpp, is installed beside the programs.

# Makes imported targets, and all that they link, name libx.a instead of libx.so where there is one.
function(denoised_prefer_archives)
  set(waiting ${ARGN})
  set(seen "")
  while(waiting)
    list(POP_FRONT waiting target)
    if(NOT TARGET "${target}" OR target IN_LIST seen)
      continue()
    endif()
    list(APPEND seen ${target})
    get_target_property(aliased ${target} ALIASED_TARGET)
    if(aliased)
      list(APPEND waiting ${aliased})
      continue()
    endif()
    get_target_property(linked ${target} INTERFACE_LINK_LIBRARIES)
    if(linked)
      list(APPEND waiting ${linked})
    endif()
    foreach(property INTERFACE_LINK_LIBRARIES IMPORTED_LOCATION IMPORTED_LOCATION_NONE
            IMPORTED_LOCATION_RELEASE)
      get_target_property(files ${target} ${property})
      if(NOT files)
        continue()
      endif()
      set(preferred "")
      foreach(file IN LISTS files)
        string(REGEX REPLACE "\\.so[.0-9]*$" ".a" archive "${file}")
        if(IS_ABSOLUTE "${archive}" AND EXISTS "${archive}")
          set(file ${archive})
        endif()
        list(APPEND preferred ${file})
      endforeach()
      set_target_properties(${target} PROPERTIES ${property} "${preferred}")
    endforeach()
  endwhile()
endfunction()

# Installs a program and, when portable, the shared libraries it still needs, in lib/denoised: all
# but those of the C and C++ runtimes, which every base image has.
function(denoised_install_program target)
  cmake_parse_arguments(PROGRAM "" "" "COMPONENTS" ${ARGN})
  if(DENOISED_PORTABLE)
    set_target_properties(${target} PROPERTIES INSTALL_RPATH
                          "$ORIGIN/../${CMAKE_INSTALL_LIBDIR}/denoised")
    # RPATH, unlike RUNPATH, is also where the libraries look for those that they need.
    target_link_options(${target} PRIVATE -Wl,--disable-new-dtags)
    set(carried RUNTIME_DEPENDENCIES
        PRE_EXCLUDE_REGEXES "^lib(c|m|dl|rt|pthread|resolv|gcc_s|stdc\\+\\+)\\.so" "^ld-linux"
        LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR}/denoised)
  endif()
  foreach(component IN LISTS PROGRAM_COMPONENTS)
    install(TARGETS ${target} ${carried} COMPONENT ${component}
            RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR} COMPONENT ${component})
  endforeach()
endfunction()
