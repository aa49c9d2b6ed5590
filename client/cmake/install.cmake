# SPDX-License-Identifier: Apache-2.0
# find_package(denoised) gives denoised::client. The client's copy of the wire contract is a library
# of its own; no header of the client names it.
include(CMakePackageConfigHelpers)
set(denoised_package ${CMAKE_INSTALL_LIBDIR}/cmake/denoised)
set_target_properties(denoised_client PROPERTIES EXPORT_NAME client)
set_target_properties(denoised_client_proto PROPERTIES EXPORT_NAME client_proto)
install(TARGETS denoised_client denoised_client_proto EXPORT denoised COMPONENT client
        ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR} LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR})
install(FILES denoised/client.h denoised/connection.h denoised/error.h denoised/generation.h
              denoised/mock_connection.h denoised/retry.h
        DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}/denoised COMPONENT client)
install(EXPORT denoised NAMESPACE denoised:: FILE denoisedTargets.cmake
        DESTINATION ${denoised_package} COMPONENT client)
configure_package_config_file(cmake/denoisedConfig.cmake.in
                              ${CMAKE_CURRENT_BINARY_DIR}/denoisedConfig.cmake
                              INSTALL_DESTINATION ${denoised_package})
write_basic_package_version_file(${CMAKE_CURRENT_BINARY_DIR}/denoisedConfigVersion.cmake
                                 COMPATIBILITY SameMinorVersion)
install(FILES ${CMAKE_CURRENT_BINARY_DIR}/denoisedConfig.cmake
              ${CMAKE_CURRENT_BINARY_DIR}/denoisedConfigVersion.cmake
        DESTINATION ${denoised_package} COMPONENT client)
