// SPDX-License-Identifier: Apache-2.0
//
// A library of precompiled headers alone has to have a source.
