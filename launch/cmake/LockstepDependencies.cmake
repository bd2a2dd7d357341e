# Finds what Lockstep is built with. Debian's packages are enough (launch/install_deps.sh names them). Static archives are
# preferred where a package has them, so that the binary runs on a machine that has Open MPI and nothing else.

find_package(Threads REQUIRED)
set(MPI_CXX_SKIP_MPICXX ON)  # the C++ bindings of MPI-2 are not used; without this libmpi_cxx is linked
find_package(MPI REQUIRED COMPONENTS C)
find_package(absl REQUIRED)
find_package(nlohmann_json REQUIRED)
find_package(spdlog REQUIRED)
# spdlog is compiled into one source file, and so is fmt: no shared libfmt.
set_target_properties(spdlog::spdlog_header_only PROPERTIES
  INTERFACE_LINK_LIBRARIES "fmt::fmt-header-only;Threads::Threads")

# Debian's Abseil targets name the shared libraries, though the archives lie beside them.
get_property(_targets DIRECTORY PROPERTY IMPORTED_TARGETS)
foreach(_target IN LISTS _targets)
  if(_target MATCHES "^absl::")
    get_target_property(_location ${_target} IMPORTED_LOCATION_NONE)
    if(_location MATCHES "\\.so[.0-9]*$")
      string(REGEX REPLACE "\\.so[.0-9]*$" ".a" _archive ${_location})
      if(EXISTS ${_archive})
        set_target_properties(${_target} PROPERTIES IMPORTED_LOCATION_NONE ${_archive})
      endif()
    endif()
  endif()
endforeach()

# An imported target for a library that has no CMake package of its own.
function(lockstep_import name header archive)
  find_path(${name}_INCLUDE_DIR ${header} REQUIRED)
  find_library(${name}_LIBRARY NAMES ${archive} REQUIRED)
  add_library(lockstep_dep::${name} UNKNOWN IMPORTED GLOBAL)
  set_target_properties(lockstep_dep::${name} PROPERTIES
    IMPORTED_LOCATION ${${name}_LIBRARY} INTERFACE_INCLUDE_DIRECTORIES ${${name}_INCLUDE_DIR})
endfunction()
lockstep_import(pcre2 pcre2.h libpcre2-8.a)
lockstep_import(utf8proc utf8proc.h libutf8proc.a)
set_target_properties(lockstep_dep::utf8proc PROPERTIES INTERFACE_COMPILE_DEFINITIONS UTF8PROC_STATIC)
