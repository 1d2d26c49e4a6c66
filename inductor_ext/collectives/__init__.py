"""Ops that communicate."""
